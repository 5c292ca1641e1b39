/* The bound: what two pinned processes can do at best with an in-place f32 all_reduce (sum) over one shared mapping.
   Nothing else is in it: no errors, no other type, no third rank, no sleeping. Each half of a block has an owner. A rank
   puts the other's half into the mapping, adds what it gets for its own half, writing the sums to both its
   buffer and the mapping, and takes the other half's sums from there. Blocks fit into the cache, and two sets of slots
   let a rank begin the next block before its peer has read the last.

   gcc -O3 -march=x86-64-v3 -o limit limit.c && ./limit 4096 1048576

   Verified before and after times are taken; prints bench,dtype,bytes,world,system,median,minimum in µs. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { HALF = 256 * 1024 / sizeof(float), PERIOD = 65521, WARM_UP = 3 };

/* Counters of blocks, each written by one rank and on a cache line of its own. */
typedef struct {
  _Alignas(128) _Atomic uint64_t given; /* the peer's half is in the mapping */
  _Alignas(128) _Atomic uint64_t summed; /* the sums of the own half are there */
  _Alignas(128) _Atomic uint64_t taken; /* all of the peer's has been read */
} Progress;

typedef struct {
  Progress progress;
  struct {
    _Alignas(4096) float half[HALF], sums[HALF];
  } slot[2];
} Side;

static Side *sides;
static int rank;
static uint64_t block;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

static void await(_Atomic uint64_t *counter, uint64_t value) {
  for (int spins = 0; atomic_load_explicit(counter, memory_order_acquire) < value;) {
    if (++spins == 2000) {
      spins = 0;
      sched_yield();
    }
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
  }
}

static void tell(_Atomic uint64_t *counter, uint64_t value) {
  atomic_store_explicit(counter, value, memory_order_release);
}

static void add(float *restrict own, const float *restrict theirs, float *restrict out, size_t count) {
  for (size_t i = 0; i < count; i++) out[i] = own[i] = own[i] + theirs[i];
}

static void all_reduce(float *data, size_t count) {
  Side *mine = &sides[rank], *peer = &sides[1 - rank];
  while (count) {
    size_t length = count < 2 * HALF ? count : 2 * HALF, low = length / 2;
    size_t own = rank ? length - low : low, other = length - own;
    float *own_half = data + (rank ? low : 0), *other_half = data + (rank ? 0 : low);
    uint64_t now = ++block;
    int s = now % 2;
    if (now > 2) await(&peer->progress.taken, now - 2);
    memcpy(mine->slot[s].half, other_half, other * sizeof(float));
    tell(&mine->progress.given, now);
    await(&peer->progress.given, now);
    add(own_half, peer->slot[s].half, mine->slot[s].sums, own);
    tell(&mine->progress.summed, now);
    await(&peer->progress.summed, now);
    memcpy(other_half, peer->slot[s].sums, other * sizeof(float));
    tell(&mine->progress.taken, now);
    data += length;
    count -= length;
  }
}

static float value(size_t i) { return (i % PERIOD * 40503 >> 7) % 61 + 1; }

static void align(void) {
  float one = 0;
  all_reduce(&one, 1);
}

static void verify(float *data, size_t count) {
  for (size_t i = 0; i < count; i++) data[i] = value(i) * (rank + 1);
  all_reduce(data, count);
  for (size_t i = 0; i < count; i++)
    if (data[i] != value(i) * 3) {
      fprintf(stderr, "limit: element %zu of %zu is wrong on rank %d\n", i, count, rank);
      /* Both, for the other would wait for ever. */
      kill(0, SIGTERM);
    }
  align();
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void measure(size_t bytes) {
  size_t count = bytes / sizeof(float), rounds = (256u << 20) / (bytes ? bytes : 1);
  rounds = rounds < 10 ? 10 : rounds > 400 ? 400 : rounds;
  float *data = malloc(bytes);
  double *times = malloc(rounds * sizeof(double));
  verify(data, count);
  memset(data, 0, bytes);
  for (size_t i = 0; i < rounds + WARM_UP; i++) {
    align();
    double start = now();
    all_reduce(data, count);
    if (i >= WARM_UP) times[i - WARM_UP] = now() - start;
  }
  verify(data, count);
  qsort(times, rounds, sizeof(double), ascending);
  if (rank == 0) printf("all_reduce,f32,%zu,2,limit,%.3f,%.3f\n", bytes, times[rounds / 2], times[0]);
  fflush(stdout);
  free(data);
  free(times);
}

int main(int argc, char **argv) {
  sides = mmap(NULL, 2 * sizeof(Side), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (sides == MAP_FAILED) return perror("limit: no shared mapping"), 1;
  setpgid(0, 0);
  pid_t child = fork();
  if (child < 0) return perror("limit: no second process"), 1;
  rank = child == 0;
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(rank, &core);
  if (sched_setaffinity(0, sizeof core, &core)) return perror("limit: two cores are needed"), kill(0, SIGTERM);
  for (int i = 1; i < argc; i++) measure(strtoull(argv[i], NULL, 10));
  int status = 0;
  if (rank == 0) wait(&status);
  return status != 0;
}
