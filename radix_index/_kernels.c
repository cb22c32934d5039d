/* The index's loops over flat arrays. `runs`, `recode` and `bind` do what those of radix_index/kernels.py do, `match` what
 * `tally` does there; `find`, `upsert`, `erase` and `migrate` are how table.FlatTable leads from keys to rows:
 *
 * A table is an array of 32-bit cells (0 = empty, ERASED = was used, else 6 bits of the key's hash over row + 1) over an
 * array of 64-bit keys, one a row. Open addressing, linear probing, the first cell of a key chosen by the top bits of a
 * multiplicative hash. While a table grows there are two cell arrays: `old` is drained little by little into `cells`; a key
 * may be in either.
 *
 * Buffers come from numpy (contiguous, of the right item size: checked). No Python object is touched inside a loop.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

#define EMPTY 0u
#define ERASED 0xFFFFFFFFu
#define NO_ROW 0xFFFFFFFFu
#define ROW_BITS 26
#define ROW_MASK ((1u << ROW_BITS) - 1)
#define STORED_BITS 15
#define PENDING_BIT 16
#define TALLY_WIDTH 5

typedef struct {
    const uint32_t *cells; /* length is a power of two, or 0 */
    uint64_t mask;
    int shift;
} Cells;

static Cells cells_of(const Py_buffer *view) {
    Cells c = {view->buf, (uint64_t)view->len / 4 - 1, 64};
    for (uint64_t n = (uint64_t)view->len / 4; n > 1; n >>= 1) c.shift--;
    return c;
}

static inline uint64_t scatter(uint64_t key) { return key * UINT64_C(0x9E3779B97F4A7C15); }

static inline uint64_t home(const Cells *c, uint64_t key) { return c->shift == 64 ? 0 : scatter(key) >> c->shift; }

static inline uint32_t tag_of(uint64_t key) { return (uint32_t)(scatter(key) >> 20) << ROW_BITS; }

static inline uint32_t row_of(uint32_t cell) { return (cell & ROW_MASK) - 1; } /* EMPTY becomes NO_ROW */

/* Tell whether the cell may be the key's: the tag spares most looks at keys of other cells, which are cache misses. */
static inline int may_be(uint32_t cell, uint32_t tag) { return !((cell ^ tag) >> ROW_BITS) && cell != ERASED; }

/* Return the index of the key's cell, or of the empty cell that ends the search. */
static inline uint64_t probe(const Cells *c, const uint64_t *keys, uint64_t key) {
    uint32_t tag = tag_of(key);
    uint64_t i = home(c, key);
    for (;; i = (i + 1) & c->mask) {
        uint32_t cell = c->cells[i];
        if (cell == EMPTY || (may_be(cell, tag) && keys[row_of(cell)] == key)) return i;
    }
}

static inline uint32_t lookup(const Cells *c, const Cells *old, const uint64_t *keys, uint64_t key) {
    uint32_t cell = c->cells[probe(c, keys, key)];
    if (cell == EMPTY && old->cells) cell = old->cells[probe(old, keys, key)];
    return row_of(cell);
}

/* A key's cell and the key behind it are nearly always cache misses: fetch them this many keys ahead. */
#define FAR 16
#define NEAR 8

static inline void fetch_ahead(const Cells *c, const uint64_t *keys, const uint64_t *query, Py_ssize_t i, Py_ssize_t count) {
    if (!c->cells) return;
    if (i == 0)
        for (Py_ssize_t k = 0; k < FAR && k < count; k++) __builtin_prefetch(&c->cells[home(c, query[k])]);
    if (i + FAR < count) __builtin_prefetch(&c->cells[home(c, query[i + FAR])]);
    if (i + NEAR < count) {
        uint32_t cell = c->cells[home(c, query[i + NEAR])];
        if (cell != EMPTY && may_be(cell, tag_of(query[i + NEAR]))) __builtin_prefetch(&keys[row_of(cell)]);
    }
}

/* --- buffers --- */

#define MAX_BUFFERS 9
typedef struct {
    Py_buffer views[MAX_BUFFERS];
    int count;
} Buffers;

static void release(Buffers *b) {
    while (b->count) PyBuffer_Release(&b->views[--b->count]);
}

/* `format`: one letter a buffer: its item size (4 or 8, 1) as '4', '8', '1'; upper half of the alphabet is not used. */
static int acquire(Buffers *b, PyObject *const *args, Py_ssize_t given, const char *format, Py_ssize_t extra) {
    b->count = 0;
    Py_ssize_t wanted = 0;
    while (format[wanted]) wanted++;
    if (given != wanted + extra) {
        PyErr_Format(PyExc_TypeError, "%zd arguments expected, %zd given", wanted + extra, given);
        return -1;
    }
    for (Py_ssize_t i = 0; i < wanted; i++) {
        if (PyObject_GetBuffer(args[i], &b->views[i], PyBUF_C_CONTIGUOUS) < 0) goto failed;
        b->count++;
        if (b->views[i].itemsize != format[i] - '0') {
            PyErr_Format(PyExc_TypeError, "argument %zd: items of %c bytes expected", i, format[i]);
            goto failed;
        }
    }
    return 0;
failed:
    release(b);
    return -1;
}

static Py_ssize_t items(const Py_buffer *view) { return view->len / view->itemsize; }

static int power_of_two(Py_ssize_t n) { return n > 0 && (n & (n - 1)) == 0; }

static int check_tables(Buffers *b, int cells, int old) {
    if (power_of_two(items(&b->views[cells])) && (!items(&b->views[old]) || power_of_two(items(&b->views[old])))) return 0;
    PyErr_SetString(PyExc_ValueError, "the length of a cell array is a power of two");
    release(b);
    return -1;
}

static Cells old_cells_of(const Py_buffer *view) {
    Cells none = {NULL, 0, 64};
    return view->len ? cells_of(view) : none;
}

/* --- kernels --- */

/* find(cells, old, keys, query, out) -> how many of query were found; out[i] = row or NO_ROW */
static PyObject *find(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Buffers b;
    if (acquire(&b, args, n, "44884", 0) < 0 || check_tables(&b, 0, 1) < 0) return NULL;
    Cells cells = cells_of(&b.views[0]), old = old_cells_of(&b.views[1]);
    const uint64_t *keys = b.views[2].buf, *query = b.views[3].buf;
    uint32_t *out = b.views[4].buf, rows = (uint32_t)items(&b.views[2]);
    Py_ssize_t count = items(&b.views[3]), found = 0;
    if (items(&b.views[4]) < count) {
        PyErr_SetString(PyExc_ValueError, "out is too short");
        release(&b);
        return NULL;
    }
    uint32_t row = NO_ROW;
    for (Py_ssize_t i = 0; i < count; i++) {
        fetch_ahead(&cells, keys, query, i, count);
        fetch_ahead(&old, keys, query, i, count);
        /* A chain is mostly stored in neighbouring rows: look there first. A free row's key is never read as a match,
           because its cell is gone and the caller clears the key. */
        if (row != NO_ROW && row + 1 < rows && keys[row + 1] == query[i] && query[i]) row++;
        else row = lookup(&cells, &old, keys, query[i]);
        out[i] = row;
        found += row != NO_ROW;
    }
    release(&b);
    return PyLong_FromSsize_t(found);
}

/* upsert(cells, old, keys, query, stack, out, used, stacked) -> how many rows were taken; out[i] = row of query[i] */
static PyObject *upsert(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Buffers b;
    if (acquire(&b, args, n, "448844", 2) < 0 || check_tables(&b, 0, 1) < 0) return NULL;
    Cells cells = cells_of(&b.views[0]), old = old_cells_of(&b.views[1]);
    uint32_t *slots = b.views[0].buf, *out = b.views[5].buf;
    uint64_t *keys = b.views[2].buf;
    const uint64_t *query = b.views[3].buf;
    const uint32_t *stack = b.views[4].buf;
    Py_ssize_t count = items(&b.views[3]), rows = items(&b.views[2]), taken = 0;
    Py_ssize_t used = PyLong_AsSsize_t(args[6]), stacked = PyLong_AsSsize_t(args[7]);
    const char *error = PyErr_Occurred() ? "" : items(&b.views[5]) < count ? "out is too short" : NULL;
    for (Py_ssize_t i = 0; i < count && !error; i++) {
        fetch_ahead(&cells, keys, query, i, count);
        fetch_ahead(&old, keys, query, i, count);
        uint64_t at = probe(&cells, keys, query[i]);
        uint32_t cell = slots[at];
        if (cell == EMPTY && old.cells) {
            uint32_t older = old.cells[probe(&old, keys, query[i])];
            if (older != EMPTY) {
                out[i] = row_of(older);
                continue;
            }
        }
        if (cell == EMPTY) {
            uint32_t row;
            if (used < rows) {
                row = (uint32_t)used++;
            } else if (stacked) {
                row = stack[--stacked];
            } else {
                error = "no free row";
                break;
            }
            keys[row] = query[i];
            slots[at] = cell = tag_of(query[i]) | (row + 1);
            taken++;
        }
        out[i] = row_of(cell);
    }
    release(&b);
    if (error && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, error);
    return error ? NULL : PyLong_FromSsize_t(taken);
}

/* Close the hole at `i`: move back every cell that could not be found past it. */
static void erase_at(uint32_t *slots, const Cells *c, const uint64_t *keys, uint64_t i) {
    uint64_t j = i;
    for (;;) {
        slots[i] = EMPTY;
        for (;;) {
            j = (j + 1) & c->mask;
            if (slots[j] == EMPTY) return;
            uint64_t k = home(c, keys[row_of(slots[j])]);
            if (i <= j ? (i < k && k <= j) : (i < k || k <= j)) continue;
            break;
        }
        slots[i] = slots[j];
        i = j;
    }
}

/* erase(cells, old, keys, rows): take the rows' keys out of the table */
static PyObject *erase(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Buffers b;
    if (acquire(&b, args, n, "4484", 0) < 0 || check_tables(&b, 0, 1) < 0) return NULL;
    Cells cells = cells_of(&b.views[0]), old = old_cells_of(&b.views[1]);
    uint32_t *slots = b.views[0].buf, *old_slots = b.views[1].buf;
    const uint64_t *keys = b.views[2].buf;
    const uint32_t *rows = b.views[3].buf;
    for (Py_ssize_t i = 0; i < items(&b.views[3]); i++) {
        uint64_t key = keys[rows[i]], at = probe(&cells, keys, key);
        if (slots[at] != EMPTY) erase_at(slots, &cells, keys, at);
        if (old.cells) {
            at = probe(&old, keys, key);
            if (old_slots[at] != EMPTY) old_slots[at] = ERASED;
        }
    }
    release(&b);
    Py_RETURN_NONE;
}

/* migrate(cells, old, keys, start, stop): copy old[start:stop] into cells */
static PyObject *migrate(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Buffers b;
    if (acquire(&b, args, n, "448", 2) < 0 || check_tables(&b, 0, 1) < 0) return NULL;
    Cells cells = cells_of(&b.views[0]);
    uint32_t *slots = b.views[0].buf;
    const uint32_t *old = b.views[1].buf;
    const uint64_t *keys = b.views[2].buf;
    Py_ssize_t start = PyLong_AsSsize_t(args[3]), stop = PyLong_AsSsize_t(args[4]);
    if (PyErr_Occurred() || start < 0 || stop > items(&b.views[1])) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "range outside old");
        release(&b);
        return NULL;
    }
    for (Py_ssize_t i = start; i < stop; i++) {
        uint32_t cell = i + FAR < stop ? old[i + FAR] : EMPTY;
        if (cell != EMPTY && cell != ERASED) __builtin_prefetch(&keys[row_of(cell)]);
        cell = i + NEAR < stop ? old[i + NEAR] : EMPTY;
        if (cell != EMPTY && cell != ERASED) __builtin_prefetch(&slots[home(&cells, keys[row_of(cell)])]);
        cell = old[i];
        if (cell == EMPTY || cell == ERASED) continue;
        slots[probe(&cells, keys, keys[row_of(cell)])] = cell;
    }
    release(&b);
    Py_RETURN_NONE;
}

/* Where a block counts by its bits: the fastest tier, else pending, else (GONE) it ends the run. */
#define GONE 5
static const uint8_t place[32] = {GONE, 0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0,
                                  4,    0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0};

/* Count `length` blocks with holders `held` for every column that is still in the run; return how many still are. */
static Py_ssize_t tally(const uint8_t *held, int32_t length, uint32_t *alive, Py_ssize_t n, const uint32_t *columns,
                        int32_t *out) {
    Py_ssize_t kept = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        uint32_t which = alive[i];
        int at = place[held[columns[which]] & (STORED_BITS | PENDING_BIT)];
        int32_t *counts = out + (Py_ssize_t)which * TALLY_WIDTH;
        alive[kept] = which;
        kept += at != GONE;
        if (at != GONE) counts[counts[TALLY_WIDTH - 1] ? TALLY_WIDTH - 1 : at] += length;
    }
    return kept;
}

/* match(cells, old, keys, query, sets, stamps, presence, columns, out, width, stamp) -> leading blocks known to the table */
static PyObject *match(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Buffers b;
    if (acquire(&b, args, n, "448844144", 2) < 0 || check_tables(&b, 0, 1) < 0) return NULL;
    Cells cells = cells_of(&b.views[0]), old = old_cells_of(&b.views[1]);
    const uint64_t *keys = b.views[2].buf, *query = b.views[3].buf;
    const uint32_t *sets = b.views[4].buf, *columns = b.views[7].buf;
    uint32_t *stamps = b.views[5].buf, rows = (uint32_t)items(&b.views[2]);
    const uint8_t *presence = b.views[6].buf;
    int32_t *out = b.views[8].buf;
    Py_ssize_t count = items(&b.views[3]), live = items(&b.views[7]), width = PyLong_AsSsize_t(args[9]), i = 0;
    uint32_t stamp = (uint32_t)PyLong_AsUnsignedLong(args[10]);
    uint32_t *alive = malloc((size_t)(live ? live : 1) * sizeof *alive);
    if (PyErr_Occurred() || !alive || items(&b.views[8]) < live * TALLY_WIDTH) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "out is too short");
        free(alive);
        release(&b);
        return NULL;
    }
    for (Py_ssize_t c = 0; c < live; c++) alive[c] = (uint32_t)c;
    uint32_t row = NO_ROW, set = 0;
    int32_t length = 0;
    for (; i < count && live; i++) {
        if (row != NO_ROW && row + 1 < rows && keys[row + 1] == query[i] && query[i]) row++;
        else row = lookup(&cells, &old, keys, query[i]);
        if (row == NO_ROW) break;
        if (length && sets[row] != set) {
            live = tally(presence + (size_t)set * (size_t)width, length, alive, live, columns, out);
            length = 0;
            if (!live) break;
        }
        set = sets[row];
        stamps[row] = stamp;
        length++;
    }
    if (length) tally(presence + (size_t)set * (size_t)width, length, alive, live, columns, out);
    free(alive);
    release(&b);
    return PyLong_FromSsize_t(i);
}

/* runs(values, stamps, rows, stamp) -> [(values[row], first i of the run), …]; stamps[row] = stamp */
static PyObject *runs(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Buffers b;
    if (acquire(&b, args, n, "444", 1) < 0) return NULL;
    const uint32_t *values = b.views[0].buf, *rows = b.views[2].buf;
    uint32_t *stamps = b.views[1].buf, stamp = (uint32_t)PyLong_AsUnsignedLong(args[3]), last = 0;
    PyObject *found = PyErr_Occurred() ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; found && i < items(&b.views[2]); i++) {
        uint32_t value = values[rows[i]];
        stamps[rows[i]] = stamp;
        if (!i || value != last) {
            PyObject *run = Py_BuildValue("(In)", value, i);
            if (!run || PyList_Append(found, run) < 0) Py_CLEAR(found);
            Py_XDECREF(run);
        }
        last = value;
    }
    release(&b);
    return found;
}

/* recode(values, rows, before, after) -> how many values[row] went from before to after */
static PyObject *recode(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Buffers b;
    if (acquire(&b, args, n, "44", 2) < 0) return NULL;
    uint32_t *values = b.views[0].buf, before = (uint32_t)PyLong_AsUnsignedLong(args[2]);
    uint32_t after = (uint32_t)PyLong_AsUnsignedLong(args[3]);
    const uint32_t *rows = b.views[1].buf;
    Py_ssize_t count = PyErr_Occurred() ? 0 : items(&b.views[1]), changed = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (values[rows[i]] != before) continue;
        values[rows[i]] = after;
        changed++;
    }
    release(&b);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(changed);
}

/* bind(owners, next, first, names, rows) -> how many names already belonged to another row */
static PyObject *bind(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Buffers b;
    if (acquire(&b, args, n, "44444", 0) < 0) return NULL;
    uint32_t *owners = b.views[0].buf, *next = b.views[1].buf, *first = b.views[2].buf;
    const uint32_t *names = b.views[3].buf, *rows = b.views[4].buf;
    Py_ssize_t clashes = 0;
    for (Py_ssize_t i = 0; i < items(&b.views[3]); i++) {
        uint32_t name = names[i], owner = rows[i] + 1;
        if (owners[name] == 0) {
            owners[name] = owner;
            next[name] = first[rows[i]];
            first[rows[i]] = name + 1;
        } else {
            clashes += owners[name] != owner;
        }
    }
    release(&b);
    return PyLong_FromSsize_t(clashes);
}

#define KERNEL(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {KERNEL(find),    KERNEL(upsert), KERNEL(erase), KERNEL(migrate),
                                KERNEL(match),   KERNEL(runs),   KERNEL(recode), KERNEL(bind),
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
