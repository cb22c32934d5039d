/* Moving pages without the interpreter in between: copied and hashed in one pass, read and written many at a time.
 *
 * copy(targets, sources) -> list of XXH3 (64 bits) of each source, copied while it is hashed. A page is bigger than what a
 *     core keeps near, so what costs is memory; the hash rides along, and streaming stores spare the read of what is
 *     overwritten.
 * queue(depth) -> a queue of the kernel's asynchronous I/O for one caller at a time.
 * transfer(queue, fd, direct_fd, write, buffers, firsts, offsets, depth, deadline, dock)
 *         -> (bytes or -errno of each run, hash of each buffer that was read).
 *     Run r is buffers[firsts[r]:firsts[r+1]], neighbours on the medium from offsets[r] on; it goes over `direct_fd` (-1:
 *     there is none) when all its buffers lie and end on pages of memory. Up to `depth` runs are on their way at once;
 *     each is hashed as it arrives, in this thread, while the others are still coming. With `dock` (memory that lies on
 *     pages, or None) what is read arrives there and is copied to its buffer while it is hashed. After `deadline` (ns of
 *     CLOCK_MONOTONIC) no further run is begun (-ETIMEDOUT); those begun are waited for, since the kernel may still
 *     write into their buffers.
 *
 * The hash is XXH3 with the default secret and no seed as its specification gives it for inputs over 240 bytes:
 * https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md (Yann Collet, BSD 2-Clause). kvstore/memory.py and
 * kvstore/tiers/slab.py do the same in Python where this was not compiled; tests hold the two against each other.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <errno.h>
#include <linux/aio_abi.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "_xxh3.h"

#define LEAST_BYTES 241
#define BLOCK_BYTES 1024
#define STRIPE_BYTES 64
#define P32_1 UINT64_C(0x9E3779B1)
#define P32_2 UINT64_C(0x85EBCA77)
#define P32_3 UINT64_C(0xC2B2AE3D)
#define P64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define P64_3 UINT64_C(0x165667B19E3779F9)
#define P64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define P64_5 UINT64_C(0x27D4EB2F165667C5)

/* Takes `stripes` stripes into the accumulators; with `out`, copies them. */
typedef void (*Accumulate)(uint64_t acc[8], const uint8_t *in, uint8_t *out, size_t stripes);

static void accumulate_plain(uint64_t acc[8], const uint8_t *in, uint8_t *out, size_t stripes) {
    if (out) memcpy(out, in, stripes * STRIPE_BYTES);
    for (size_t s = 0; s < stripes; s++, in += STRIPE_BYTES)
        for (size_t i = 0; i < 8; i++) {
            uint64_t value = read64(in + 8 * i), keyed = value ^ read64(secret + 8 * s + 8 * i);
            acc[i ^ 1] += value;
            acc[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
        }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void accumulate_avx2(uint64_t acc[8], const uint8_t *in, uint8_t *out, size_t stripes) {
    __m256i low = _mm256_loadu_si256((const __m256i *)acc), high = _mm256_loadu_si256((const __m256i *)(acc + 4));
    int streams = out && (uintptr_t)out % 32 == 0;
    for (size_t s = 0; s < stripes; s++, in += STRIPE_BYTES) {
        _mm_prefetch((const char *)in + 768, _MM_HINT_T0);
        __m256i a = _mm256_loadu_si256((const __m256i *)in), b = _mm256_loadu_si256((const __m256i *)(in + 32));
        if (streams) {
            _mm256_stream_si256((__m256i *)out, a);
            _mm256_stream_si256((__m256i *)(out + 32), b);
            out += STRIPE_BYTES;
        } else if (out) {
            _mm256_storeu_si256((__m256i *)out, a);
            _mm256_storeu_si256((__m256i *)(out + 32), b);
            out += STRIPE_BYTES;
        }
        __m256i keyed_a = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *)(secret + 8 * s)));
        __m256i keyed_b = _mm256_xor_si256(b, _mm256_loadu_si256((const __m256i *)(secret + 8 * s + 32)));
        __m256i product_a = _mm256_mul_epu32(keyed_a, _mm256_srli_epi64(keyed_a, 32));
        __m256i product_b = _mm256_mul_epu32(keyed_b, _mm256_srli_epi64(keyed_b, 32));
        low = _mm256_add_epi64(product_a, _mm256_add_epi64(low, _mm256_shuffle_epi32(a, _MM_SHUFFLE(1, 0, 3, 2))));
        high = _mm256_add_epi64(product_b, _mm256_add_epi64(high, _mm256_shuffle_epi32(b, _MM_SHUFFLE(1, 0, 3, 2))));
    }
    _mm256_storeu_si256((__m256i *)acc, low);
    _mm256_storeu_si256((__m256i *)(acc + 4), high);
}
#endif

static Accumulate accumulate = accumulate_plain;

/* Returns the hash of `length` bytes (at least LEAST_BYTES); with `out`, copies them there. */
static uint64_t hash_bytes(const uint8_t *in, uint8_t *out, size_t length) {
    uint64_t acc[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    const uint8_t *end = in + length;
    size_t blocks = (length - 1) / BLOCK_BYTES;
    for (size_t b = 0; b < blocks; b++, in += BLOCK_BYTES) {
        accumulate(acc, in, out ? out + b * BLOCK_BYTES : NULL, BLOCK_BYTES / STRIPE_BYTES);
        for (size_t i = 0; i < 8; i++)
            acc[i] = (acc[i] ^ acc[i] >> 47 ^ read64(secret + SECRET_BYTES - STRIPE_BYTES + 8 * i)) * P32_1;
    }
    if (out) memcpy(out + blocks * BLOCK_BYTES, in, (size_t)(end - in));
    accumulate(acc, in, NULL, (size_t)(end - in - 1) / STRIPE_BYTES);
    const uint8_t *last = end - STRIPE_BYTES;
    for (size_t i = 0; i < 8; i++) {
        uint64_t value = read64(last + 8 * i), keyed = value ^ read64(secret + SECRET_BYTES - STRIPE_BYTES - 7 + 8 * i);
        acc[i ^ 1] += value;
        acc[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
    }
    uint64_t h = (uint64_t)length * P64_1;
    for (size_t i = 0; i < 4; i++) h += fold(acc[2 * i] ^ read64(secret + 11 + 16 * i), acc[2 * i + 1] ^ read64(secret + 19 + 16 * i));
    return avalanche(h);
}

/* The buffers of a sequence, held until they are let go. */
typedef struct {
    Py_buffer *views;
    Py_ssize_t count;
} Buffers;

static void let_go(Buffers *b) {
    for (Py_ssize_t i = 0; i < b->count; i++) PyBuffer_Release(&b->views[i]);
    PyMem_Free(b->views);
    b->views = NULL;
    b->count = 0;
}

static int hold(PyObject *sequence, int flags, Buffers *b) {
    Py_ssize_t wanted = PySequence_Size(sequence);
    b->count = 0;
    b->views = wanted < 0 ? NULL : PyMem_Calloc((size_t)wanted + 1, sizeof(Py_buffer));
    if (!b->views) return wanted < 0 ? -1 : (PyErr_NoMemory(), -1);
    for (Py_ssize_t i = 0; i < wanted; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        int failed = !item || PyObject_GetBuffer(item, &b->views[i], flags) < 0;
        Py_XDECREF(item);
        if (failed) {
            let_go(b);
            return -1;
        }
        b->count = i + 1;
        if (b->views[i].len < LEAST_BYTES) {
            PyErr_Format(PyExc_ValueError, "a buffer of %zd bytes; the least is %d", b->views[i].len, LEAST_BYTES);
            let_go(b);
            return -1;
        }
    }
    return 0;
}

static PyObject *numbers(const uint64_t *values, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(values[i]);
        if (!value || PyList_SetItem(list, i, value) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *copy(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != 2) return PyErr_Format(PyExc_TypeError, "2 arguments expected, %zd given", given);
    Buffers to, from;
    if (hold(args[0], PyBUF_WRITABLE, &to) < 0) return NULL;
    if (hold(args[1], PyBUF_SIMPLE, &from) < 0) return let_go(&to), NULL;
    PyObject *result = NULL;
    uint64_t *sums = PyMem_Calloc((size_t)from.count + 1, 8);
    int fit = to.count == from.count;
    for (Py_ssize_t i = 0; fit && i < from.count; i++) fit = to.views[i].len == from.views[i].len;
    if (!sums)
        PyErr_NoMemory();
    else if (!fit)
        PyErr_SetString(PyExc_ValueError, "targets and sources differ in number or length");
    else {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < from.count; i++)
            sums[i] = hash_bytes(from.views[i].buf, to.views[i].buf, (size_t)from.views[i].len);
#if defined(__x86_64__)
        _mm_sfence();
#endif
        Py_END_ALLOW_THREADS
        result = numbers(sums, from.count);
    }
    PyMem_Free(sums);
    let_go(&from);
    let_go(&to);
    return result;
}

static void end_queue(PyObject *capsule) {
    aio_context_t *context = PyCapsule_GetPointer(capsule, "keepwarm.queue");
    if (context) {
        syscall(SYS_io_destroy, *context);
        free(context);
    }
}

static PyObject *queue(PyObject *module, PyObject *depth) {
    long wanted = PyLong_AsLong(depth);
    if (wanted == -1 && PyErr_Occurred()) return NULL;
    aio_context_t *context = calloc(1, sizeof *context);
    if (!context) return PyErr_NoMemory();
    if (wanted < 1 || syscall(SYS_io_setup, wanted, context) < 0) {
        if (wanted < 1) errno = EINVAL;
        free(context);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    PyObject *capsule = PyCapsule_New(context, "keepwarm.queue", end_queue);
    if (!capsule) {
        syscall(SYS_io_destroy, *context);
        free(context);
    }
    return capsule;
}

typedef struct {
    struct iocb *blocks;
    struct iovec *vectors;
    long long *done; /* bytes of each run, or -errno */
    uint64_t *sums;
    Py_ssize_t *firsts; /* one more than there are runs */
    long long *offsets;
    Py_ssize_t runs;
    uint8_t *dock; /* places of `place_bytes` that runs arrive in, or NULL: none does */
    size_t place_bytes;
    Py_ssize_t *places; /* that are free: the first `free_places` of these */
    Py_ssize_t free_places;
    Py_ssize_t *place_of; /* of each run that has one, else -1 */
} Plan;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void give_back(Plan *p, Py_ssize_t run) {
    if (p->dock && p->place_of[run] >= 0) p->places[p->free_places++] = p->place_of[run];
}

static void settle(Plan *p, const Buffers *b, Py_ssize_t run, long long result, int writes) {
    p->done[run] = result;
    long long left = result;
    const uint8_t *landed = p->dock ? p->dock + (size_t)p->place_of[run] * p->place_bytes : NULL;
    for (Py_ssize_t i = p->firsts[run]; !writes && i < p->firsts[run + 1]; i++) {
        size_t length = (size_t)b->views[i].len;
        left -= b->views[i].len;
        if (left < 0) break;
        p->sums[i] = landed ? hash_bytes(landed, b->views[i].buf, length) : hash_bytes(b->views[i].buf, NULL, length);
        if (landed) landed += length;
    }
    give_back(p, run);
}

/* Gives a run a place, where its buffers lie behind one another; 0 when there is none. */
static int take_place(Plan *p, const Buffers *b, Py_ssize_t run) {
    if (!p->dock || p->place_of[run] >= 0) return 1;
    if (!p->free_places) return 0;
    p->place_of[run] = p->places[--p->free_places];
    uint8_t *at = p->dock + (size_t)p->place_of[run] * p->place_bytes;
    for (Py_ssize_t i = p->firsts[run]; i < p->firsts[run + 1]; i++) {
        p->vectors[i].iov_base = at;
        at += b->views[i].len;
    }
    return 1;
}

#define AT_ONCE 64
#define ALIGNMENT 4096

static int fd_for(const Plan *p, Py_ssize_t run, int fd, int direct_fd) {
    for (Py_ssize_t i = p->firsts[run]; direct_fd >= 0 && i < p->firsts[run + 1]; i++)
        if (((uintptr_t)p->vectors[i].iov_base | p->vectors[i].iov_len) % ALIGNMENT) return fd;
    return direct_fd >= 0 ? direct_fd : fd;
}

static void carry_out(Plan *p, const Buffers *b, aio_context_t context, int fd, int direct_fd, int writes, long depth,
                      int64_t deadline_ns) {
    struct io_event events[AT_ONCE];
    struct iocb *ready[AT_ONCE];
    Py_ssize_t next = 0, on_way = 0;
    long came = 0, seen = 0; /* of `events`: hashed between two looks at what can be sent, so that the disk is not left idle */
    while (next < p->runs || on_way) {
        if (next < p->runs && now_ns() >= deadline_ns)
            for (; next < p->runs; next++) p->done[next] = -ETIMEDOUT;
        long count = 0;
        while (next + count < p->runs && on_way + count < depth && count < AT_ONCE && take_place(p, b, next + count)) {
            Py_ssize_t run = next + count, first = p->firsts[run];
            struct iocb *block = &p->blocks[run];
            block->aio_data = (uint64_t)run;
            block->aio_lio_opcode = writes ? IOCB_CMD_PWRITEV : IOCB_CMD_PREADV;
            block->aio_fildes = (uint32_t)fd_for(p, run, fd, direct_fd);
            block->aio_buf = (uint64_t)(uintptr_t)(p->vectors + first);
            block->aio_nbytes = (uint64_t)(p->firsts[run + 1] - first);
            block->aio_offset = p->offsets[run];
            ready[count++] = block;
        }
        if (count) {
            long sent = syscall(SYS_io_submit, context, count, ready);
            if (sent > 0) {
                next += sent;
                on_way += sent;
            } else if (!(sent < 0 && (errno == EAGAIN || errno == EINTR) && on_way)) {
                p->done[next] = sent < 0 ? -errno : -EAGAIN; /* this run is refused; the next may not be */
                give_back(p, next++);
            }
        }
        if (seen == came && on_way) {
            seen = 0;
            came = syscall(SYS_io_getevents, context, 1L, (long)AT_ONCE, events, NULL);
            if (came < 0) came = 0;
        }
        if (seen < came) {
            settle(p, b, (Py_ssize_t)events[seen].data, events[seen].res, writes);
            seen++;
            on_way--;
        }
    }
}

static int lay_out(Plan *p, const Buffers *b, PyObject *firsts, PyObject *offsets) {
    p->runs = PySequence_Size(firsts);
    if (p->runs < 0 || PySequence_Size(offsets) != p->runs) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "one offset for each run");
        return -1;
    }
    size_t runs = (size_t)p->runs + 1, count = (size_t)b->count + 1;
    p->blocks = PyMem_Calloc(runs, sizeof *p->blocks);
    p->done = PyMem_Calloc(runs, sizeof *p->done);
    p->firsts = PyMem_Calloc(runs, sizeof *p->firsts);
    p->offsets = PyMem_Calloc(runs, sizeof *p->offsets);
    p->vectors = PyMem_Calloc(count, sizeof *p->vectors);
    p->sums = PyMem_Calloc(count, sizeof *p->sums);
    if (!p->blocks || !p->done || !p->firsts || !p->offsets || !p->vectors || !p->sums) return PyErr_NoMemory(), -1;
    for (Py_ssize_t run = 0; run < p->runs; run++) {
        PyObject *first = PySequence_GetItem(firsts, run), *offset = PySequence_GetItem(offsets, run);
        if (first && offset) {
            p->firsts[run] = PyLong_AsSsize_t(first);
            p->offsets[run] = PyLong_AsLongLong(offset);
        }
        Py_XDECREF(first);
        Py_XDECREF(offset);
        if (PyErr_Occurred()) return -1;
    }
    p->firsts[p->runs] = b->count;
    for (Py_ssize_t run = 0; run < p->runs; run++)
        if (p->firsts[run] < 0 || p->firsts[run] >= p->firsts[run + 1] || (run == 0 && p->firsts[0])) {
            PyErr_SetString(PyExc_ValueError, "runs must cover the buffers in order, none of them empty");
            return -1;
        }
    for (Py_ssize_t i = 0; i < b->count; i++) p->vectors[i] = (struct iovec){b->views[i].buf, (size_t)b->views[i].len};
    return 0;
}

/* Cuts the dock into places for the longest run; without room for one, runs go without it. */
static int cut_dock(Plan *p, const Buffers *b, const Py_buffer *dock) {
    for (Py_ssize_t run = 0; run < p->runs; run++) {
        size_t bytes = 0;
        for (Py_ssize_t i = p->firsts[run]; i < p->firsts[run + 1]; i++) bytes += (size_t)b->views[i].len;
        if (bytes > p->place_bytes) p->place_bytes = bytes;
    }
    p->place_bytes += (ALIGNMENT - p->place_bytes % ALIGNMENT) % ALIGNMENT;
    p->free_places = p->place_bytes ? dock->len / (Py_ssize_t)p->place_bytes : 0;
    if (!p->free_places) return 0;
    p->places = PyMem_Calloc((size_t)p->free_places, sizeof *p->places);
    p->place_of = PyMem_Calloc((size_t)p->runs, sizeof *p->place_of);
    if (!p->places || !p->place_of) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < p->free_places; i++) p->places[i] = i;
    for (Py_ssize_t run = 0; run < p->runs; run++) p->place_of[run] = -1;
    p->dock = dock->buf;
    return 0;
}

static PyObject *transfer(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    if (given != 10) return PyErr_Format(PyExc_TypeError, "10 arguments expected, %zd given", given);
    aio_context_t *context = PyCapsule_GetPointer(args[0], "keepwarm.queue");
    int fd = (int)PyLong_AsLong(args[1]), direct_fd = (int)PyLong_AsLong(args[2]), writes = PyObject_IsTrue(args[3]);
    long depth = PyLong_AsLong(args[7]);
    int64_t deadline_ns = PyLong_AsLongLong(args[8]);
    if (!context || PyErr_Occurred()) return NULL;
    Buffers b;
    if (hold(args[4], writes ? PyBUF_SIMPLE : PyBUF_WRITABLE, &b) < 0) return NULL;
    Py_buffer dock = {0};
    int docks = args[9] != Py_None && !writes;
    if (docks && PyObject_GetBuffer(args[9], &dock, PyBUF_WRITABLE) < 0) return let_go(&b), NULL;
    Plan p = {0};
    PyObject *result = NULL;
    if (lay_out(&p, &b, args[5], args[6]) == 0 && (!docks || cut_dock(&p, &b, &dock) == 0)) {
        Py_BEGIN_ALLOW_THREADS
        carry_out(&p, &b, *context, fd, direct_fd, writes, depth, deadline_ns);
#if defined(__x86_64__)
        _mm_sfence();
#endif
        Py_END_ALLOW_THREADS
        PyObject *done = PyList_New(p.runs), *sums = numbers(p.sums, writes ? 0 : b.count);
        for (Py_ssize_t run = 0; done && run < p.runs; run++) {
            PyObject *value = PyLong_FromLongLong(p.done[run]);
            if (!value || PyList_SetItem(done, run, value) < 0) Py_CLEAR(done);
        }
        if (done && sums) result = PyTuple_Pack(2, done, sums);
        Py_XDECREF(done);
        Py_XDECREF(sums);
    }
    PyMem_Free(p.blocks);
    PyMem_Free(p.done);
    PyMem_Free(p.firsts);
    PyMem_Free(p.offsets);
    PyMem_Free(p.vectors);
    PyMem_Free(p.sums);
    PyMem_Free(p.places);
    PyMem_Free(p.place_of);
    if (docks) PyBuffer_Release(&dock);
    let_go(&b);
    return result;
}

static PyMethodDef methods[] = {
    {"copy", (PyCFunction)(void (*)(void))copy, METH_FASTCALL, NULL},
    {"queue", queue, METH_O, NULL},
    {"transfer", (PyCFunction)(void (*)(void))transfer, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_pages", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__pages(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) accumulate = accumulate_avx2;
#endif
    return PyModule_Create(&module);
}
