// Calls one kernel on arrays from stdin and writes all arrays back: see kernels.py.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*kernel)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t,
                       uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t,
                       uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t);
#define KERNEL(name) extern void name(void);
#include "kernels.inc"
#undef KERNEL
#define KERNEL(name) {#name, (kernel)name},
static const struct { const char *name; kernel call; } table[] = {
#include "kernels.inc"
};

static uint64_t word(void) {
  uint64_t value = 0;
  if (fread(&value, 8, 1, stdin) != 1) exit(2);
  return value;
}

int main(int argc, char **argv) {
  kernel call = 0;
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (argc == 2 && !strcmp(table[i].name, argv[1])) call = table[i].call;
  if (!call) return 3;
  uintptr_t a[20] = {0};
  size_t bytes[20], arrays = word(), sizes = word(), tiles = word();
  for (size_t i = 0; i < sizes; i++) a[arrays + i] = word();
  for (size_t i = 0; i < arrays; i++) {
    bytes[i] = word();
    // As the runtime gives them: aligned to 64 bytes.
    a[i] = (uintptr_t)aligned_alloc(64, (bytes[i] + 127) / 64 * 64);
    if (bytes[i] && fread((void *)a[i], bytes[i], 1, stdin) != 1) return 4;
  }
  for (size_t tile = tiles; tile-- > 0;) {
    a[arrays + sizes] = tile;
    call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13],
         a[14], a[15], a[16], a[17], a[18], a[19]);
  }
  for (size_t i = 0; i < arrays; i++) fwrite((void *)a[i], bytes[i], 1, stdout);
  return 0;
}
