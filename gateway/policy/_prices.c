/* The loop of gateway/policy/pricing.py, where what is priced and why stands: every instance at every decision.
 *
 * prices(offers, terms, tokens, source, memory_wait_s, fetched, make) -> list of what ``make`` returns for each offer.
 *     terms: doubles, in the order of TERMS below. tokens: of the prompt. source: a position, or -1.
 *     memory_wait_s(load, needed, capacity) and fetched(load, hits, context, pulled, prompt, wait_s, now_s) are asked where
 *     a device is full, or pages of slower tiers or of another device may be read: that is the exception.
 *
 * The interpreted loop there stands in where this was not compiled; tests hold the two against each other.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>

enum { OUTPUT, NOW, OWN_SHARE, OTHERS_SHARE, FURTHER, REUSE, DECODE, IDLE, BALANCE, MOST_UNEVEN, LEAST_PULL, TERMS };
enum { LOAD, HITS, PENDING, AROUND, COSTS, PROMPTS, STEPS, WEIGHTS, QUEUED, HELD, CONTEXT, PACE, SLOWNESS, RUNNING, LATELY,
       BUSY, BACKLOG, NAMES };
static const char *const spelled[NAMES] = {"load", "hit_tokens", "pending_tokens", "around", "costs", "prompts", "steps",
    "weights", "queued_s", "held_tokens", "context_tokens", "pace", "slowness", "running", "lately_s", "busy_share",
    "backlog_s"};
static PyObject *names[NAMES];

/* What all instances of one kind of engine have in common. `of`: their costs. */
typedef struct {
    PyObject *of;
    double overhead_s, token_s, grown_s, beside_s, read_s;
} Costs;

typedef struct {
    PyObject *load, *hits; /* held until the end */
    long long hit[4], pending;
    double due, push[4], capacity; /* NaN: unknown */
    double queued_s, held, context, pace, running, lately_s, busy;
    Costs costs;
} Offer;

/* Read one number; -1 with an exception. */
static int number(PyObject *object, int name, double *out) {
    PyObject *value = PyObject_GetAttr(object, names[name]);
    if (!value) return -1;
    *out = PyFloat_AsDouble(value);
    Py_DECREF(value);
    return *out == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* Read doubles from a sequence of at least `count`. */
static int numbers(PyObject *sequence, Py_ssize_t count, double *out) {
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *value = PySequence_GetItem(sequence, i);
        if (!value) return -1;
        out[i] = PyFloat_AsDouble(value);
        Py_DECREF(value);
        if (out[i] == -1.0 && PyErr_Occurred()) return -1;
    }
    return 0;
}

static int weights_of(PyObject *costs, int fit, Py_ssize_t count, double *out) {
    PyObject *fitted = PyObject_GetAttr(costs, names[fit]);
    PyObject *weights = fitted ? PyObject_GetAttr(fitted, names[WEIGHTS]) : NULL;
    int failed = !weights || numbers(weights, count, out) < 0;
    Py_XDECREF(fitted);
    Py_XDECREF(weights);
    return failed ? -1 : 0;
}

static int read_costs(PyObject *load, const Costs *before, Costs *c) {
    PyObject *costs = PyObject_GetAttr(load, names[COSTS]);
    if (!costs) return -1;
    Py_DECREF(costs); /* the load has it */
    if (before && before->of == costs) {
        *c = *before;
        return 0;
    }
    double prompts[4], steps[2];
    if (weights_of(costs, PROMPTS, 4, prompts) < 0 || weights_of(costs, STEPS, 2, steps) < 0) return -1;
    *c = (Costs){costs, prompts[0], prompts[1], prompts[2], prompts[3], steps[1]};
    return 0;
}

static int read_around(PyObject *given, Offer *o) {
    PyObject *around = PyObject_GetAttr(given, names[AROUND]);
    PyObject *push = around ? PySequence_GetItem(around, 1) : NULL, *capacity = push ? PySequence_GetItem(around, 2) : NULL;
    int failed = !capacity || numbers(around, 1, &o->due) < 0 || numbers(push, 4, o->push) < 0;
    if (!failed) {
        o->capacity = capacity == Py_None ? NAN : PyFloat_AsDouble(capacity);
        failed = o->capacity == -1.0 && PyErr_Occurred();
    }
    Py_XDECREF(around);
    Py_XDECREF(push);
    Py_XDECREF(capacity);
    return failed ? -1 : 0;
}

static int read_offer(PyObject *given, const Costs *before, Offer *o) {
    PyObject *pending = PyObject_GetAttr(given, names[PENDING]);
    if (!pending) return -1;
    o->pending = PyLong_AsLongLong(pending);
    Py_DECREF(pending);
    if (o->pending == -1 && PyErr_Occurred()) return -1;
    if (!(o->load = PyObject_GetAttr(given, names[LOAD])) || !(o->hits = PyObject_GetAttr(given, names[HITS]))) return -1;
    for (Py_ssize_t tier = 0; tier < 4; tier++) {
        PyObject *tokens = PySequence_GetItem(o->hits, tier);
        if (!tokens) return -1;
        o->hit[tier] = PyLong_AsLongLong(tokens);
        Py_DECREF(tokens);
        if (o->hit[tier] == -1 && PyErr_Occurred()) return -1;
    }
    PyObject *load = o->load;
    return read_around(given, o) < 0 || read_costs(load, before, &o->costs) < 0 || number(load, QUEUED, &o->queued_s) < 0 ||
                   number(load, HELD, &o->held) < 0 || number(load, CONTEXT, &o->context) < 0 ||
                   number(load, PACE, &o->pace) < 0 || number(load, RUNNING, &o->running) < 0 ||
                   number(load, LATELY, &o->lately_s) < 0 || number(load, BUSY, &o->busy) < 0
               ? -1
               : 0;
}

/* What an offer costs, as far as it is known here. */
typedef struct {
    double wait_s, ttft_s, work_s;
    long long new_tokens;
    PyObject *fetch; /* held; NULL: nothing */
} Found;

static int as_double(PyObject *value, double *out) {
    if (!value) return -1;
    *out = PyFloat_AsDouble(value);
    Py_DECREF(value);
    return *out == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* Ask Python what is read instead of computed. */
static int fetch(PyObject *fetched, const Offer *o, long long context, long long pulled, long long prompt, double now_s,
                 Found *f) {
    PyObject *arguments = Py_BuildValue("(OOLLLdd)", o->load, o->hits, context, pulled, prompt, f->wait_s, now_s);
    PyObject *best = arguments ? PyObject_Call(fetched, arguments, NULL) : NULL;
    Py_XDECREF(arguments);
    int failed = !best || !PyArg_ParseTuple(best, "ddLO", &f->ttft_s, &f->work_s, &f->new_tokens, &f->fetch);
    if (!failed) Py_INCREF(f->fetch);
    Py_XDECREF(best);
    return failed ? -1 : 0;
}

static PyObject *made(PyObject *make, double cost_s, const Found *f) {
    PyObject *cost = PyFloat_FromDouble(cost_s), *ttft = PyFloat_FromDouble(f->ttft_s);
    PyObject *tokens = PyLong_FromLongLong(f->new_tokens), *price = NULL;
    if (cost && ttft && tokens)
        price = f->fetch ? PyObject_CallFunctionObjArgs(make, cost, ttft, tokens, f->fetch, NULL)
                         : PyObject_CallFunctionObjArgs(make, cost, ttft, tokens, NULL);
    Py_XDECREF(cost);
    Py_XDECREF(ttft);
    Py_XDECREF(tokens);
    return price;
}

/* The fleet's means, by which each instance is judged. */
typedef struct {
    double mean_due, decode_weight, evenly, uneven_s;
} Fleet;

static Fleet fleet_of(const Offer *offers, Py_ssize_t count, const double *terms) {
    double due = 0, lately_s = 0, busy = 0, running = 0, each = 1.0 / (double)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        due += offers[i].due;
        lately_s += offers[i].lately_s;
        busy += offers[i].busy;
        running += offers[i].running;
    }
    double idle_share = 1 - busy * each, mean_running = running * each;
    return (Fleet){due * each, terms[DECODE] * pow(idle_share, terms[IDLE]) / (1 + 0.5 * mean_running) * terms[OUTPUT],
                   lately_s ? terms[BALANCE] * (double)count / lately_s : 0.0, lately_s * each * terms[MOST_UNEVEN]};
}

static PyObject *price_of(const Offer *o, const Fleet *fleet, const double *terms, long long prompt, long long pulled,
                          PyObject *const *ask, PyObject *now) {
    PyObject *memory_wait_s = ask[0], *fetched = ask[1], *make = ask[2];
    double output = terms[OUTPUT], backlog_s = 0.0;
    const Costs *c = &o->costs;
    if (o->queued_s && as_double(PyObject_CallMethodObjArgs(o->load, names[BACKLOG], now, NULL), &backlog_s) < 0) return NULL;
    Found f = {backlog_s, 0, 0, 0, NULL};
    double needed = (double)prompt + output, wait_s;
    if (o->held + (double)prompt + output > o->capacity) { /* never, where it is not known */
        if (as_double(PyObject_CallFunction(memory_wait_s, "Odd", o->load, needed, o->capacity), &wait_s) < 0) return NULL;
        f.wait_s += wait_s;
    }
    long long context = o->hit[0] + o->pending;
    double new_tokens = (double)(f.new_tokens = prompt - context);
    f.work_s = c->overhead_s +
               new_tokens * (c->token_s + c->beside_s * o->context + c->grown_s * ((double)context + 0.5 * new_tokens));
    if (o->pace != 1) {
        double slowness;
        if (number(o->load, SLOWNESS, &slowness) < 0) return NULL;
        f.work_s *= slowness;
    }
    f.ttft_s = f.wait_s + f.work_s;
    int is_below = o->hit[1] || o->hit[2] || o->hit[3];
    if ((is_below || (double)pulled > (double)context + terms[LEAST_PULL]) &&
        fetch(fetched, o, context, pulled, prompt, terms[NOW], &f) < 0)
        return NULL;
    double rate = terms[OTHERS_SHARE] * fleet->mean_due + terms[OWN_SHARE] * o->due;
    double cost_s = f.ttft_s + f.work_s * rate * (backlog_s + 0.5 * f.work_s) + terms[FURTHER] * o->due;
    if (o->push[0]) {
        double pushed_s = ((double)(prompt - context) + output) * o->push[0];
        if (is_below)
            pushed_s -= (double)o->hit[1] * o->push[1] + (double)o->hit[2] * o->push[2] + (double)o->hit[3] * o->push[3];
        cost_s += terms[REUSE] * pushed_s;
    }
    if (o->running)
        cost_s += fleet->decode_weight * c->read_s * (o->context + 0.5 * ((double)prompt + 0.5 * output) * o->running);
    if (fleet->evenly)
        cost_s += fleet->evenly * f.ttft_s * (o->lately_s < fleet->uneven_s ? o->lately_s : fleet->uneven_s);
    PyObject *price = made(make, cost_s, &f);
    Py_XDECREF(f.fetch);
    return price;
}

static PyObject *prices(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    double terms[TERMS];
    if (given != 7) return PyErr_Format(PyExc_TypeError, "7 arguments expected, %zd given", given);
    long long prompt = PyLong_AsLongLong(args[2]), source = PyLong_AsLongLong(args[3]);
    Py_ssize_t count = PySequence_Size(args[0]);
    if (PyErr_Occurred() || numbers(args[1], TERMS, terms) < 0) return NULL;
    Offer *offers = PyMem_Calloc((size_t)count + 1, sizeof *offers);
    PyObject *found = NULL, *now = NULL;
    if (!offers) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *offer = PySequence_GetItem(args[0], i);
        int failed = !offer || read_offer(offer, i ? &offers[i - 1].costs : NULL, &offers[i]) < 0;
        Py_XDECREF(offer);
        if (failed) goto done;
    }
    Fleet fleet = fleet_of(offers, count, terms);
    long long pullable = source >= 0 && source < count ? offers[source].hit[0] : 0;
    if (!(now = PyFloat_FromDouble(terms[NOW])) || !(found = PyList_New(count))) goto done;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *price = price_of(&offers[i], &fleet, terms, prompt, i == source ? 0 : pullable, args + 4, now);
        if (!price || PyList_SetItem(found, i, price) < 0) {
            Py_CLEAR(found);
            break;
        }
    }
done:
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_XDECREF(offers[i].load);
        Py_XDECREF(offers[i].hits);
    }
    PyMem_Free(offers);
    Py_XDECREF(now);
    return found;
}

static PyMethodDef methods[] = {
    {"prices", (PyCFunction)(void (*)(void))prices, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_prices", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__prices(void) {
    for (int i = 0; i < NAMES; i++)
        if (!(names[i] = PyUnicode_InternFromString(spelled[i]))) return NULL;
    return PyModule_Create(&module);
}
