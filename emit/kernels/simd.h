// Vectors of the machine's own width, and how each weight type is widened into them.
//
// Freestanding: no libc, no thread-local storage, less than 100 KiB of stack. One object is built
// for each CPU level (x86-64-v3, x86-64-v4, aarch64); LANES is the number of floats in a vector.
#pragma once

#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

// Hidden, as everything is (-fvisibility): aarch64 would reach a visible symbol through a table that
// nobody fills.
#define EXPORT void
#define INLINE static inline __attribute__((always_inline))
#define APART __attribute__((noinline))  // its arrays are not on the stack of who calls it

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vf __attribute__((ext_vector_type(LANES)));
typedef float vf_any __attribute__((ext_vector_type(LANES), aligned(4)));
typedef uint32_t vu __attribute__((ext_vector_type(LANES)));
typedef int32_t vi __attribute__((ext_vector_type(LANES)));
typedef int8_t vi8 __attribute__((ext_vector_type(LANES), aligned(1)));
typedef uint8_t vu8 __attribute__((ext_vector_type(LANES), aligned(1)));
typedef uint16_t vu16 __attribute__((ext_vector_type(LANES), aligned(2)));
typedef _Float16 vh __attribute__((ext_vector_type(LANES), aligned(2)));

INLINE vf zero(void) { return (vf)(0.0f); }
INLINE vf splat(float x) { return (vf)(x); }
INLINE vf load_f32(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf x) { *(vf_any *)p = x; }

// bfloat16 is the upper half of a float.
INLINE vf load_bf16(const uint16_t *p) {
  return (vf)(__builtin_convertvector(*(const vu16 *)p, vu) << 16);
}
INLINE vf load_f16(const _Float16 *p) { return __builtin_convertvector(*(const vh *)p, vf); }

INLINE vi ints_i8(const uint8_t *p) { return __builtin_convertvector(*(const vi8 *)p, vi); }
INLINE vi ints_u8(const uint8_t *p) { return __builtin_convertvector(*(const vu8 *)p, vi); }
INLINE vf load_i8(const uint8_t *p) { return __builtin_convertvector(ints_i8(p), vf); }
INLINE vf load_u8(const uint8_t *p) { return __builtin_convertvector(ints_u8(p), vf); }

INLINE float one_f32(const float *p) { return *p; }
INLINE float one_bf16(const uint16_t *p) {
  union { uint32_t u; float f; } bits = {(uint32_t)*p << 16};
  return bits.f;
}
INLINE float one_f16(const _Float16 *p) { return (float)*p; }
INLINE float one_u8(const uint8_t *p) { return (float)*p; }

// The sum of all lanes, by halves.
INLINE float sum(vf x) {
#if LANES == 16
  typedef float half __attribute__((ext_vector_type(8)));
  half h = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#elif LANES == 8
  vf h = x;
#endif
  typedef float quarter __attribute__((ext_vector_type(4)));
#if LANES == 4
  quarter q = x;
#else
  quarter q = __builtin_shufflevector(h, h, 0, 1, 2, 3) + __builtin_shufflevector(h, h, 4, 5, 6, 7);
#endif
  return (q[0] + q[2]) + (q[1] + q[3]);
}

// Lanes 0, LANES, 1, LANES + 1 … of the two vectors together: their first, then their last halves;
// and every second lane of the two.
#if LANES == 16
#define FIRST 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define LAST 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define DOUBLINGS 4
#elif LANES == 8
#define FIRST 0, 8, 1, 9, 2, 10, 3, 11
#define LAST 4, 12, 5, 13, 6, 14, 7, 15
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#define DOUBLINGS 3
#else
#define FIRST 0, 4, 1, 5
#define LAST 2, 6, 3, 7
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#define DOUBLINGS 2
#endif

// LANES vectors as a square matrix, transposed: each round interleaves the two halves of the rows.
INLINE void transpose(vf rows[LANES]) {
  for (int round = 0; round < DOUBLINGS; round++) {
    vf next[LANES];
    for (int i = 0; i < LANES / 2; i++) {
      next[2 * i] = __builtin_shufflevector(rows[i], rows[i + LANES / 2], FIRST);
      next[2 * i + 1] = __builtin_shufflevector(rows[i], rows[i + LANES / 2], LAST);
    }
    for (int i = 0; i < LANES; i++) rows[i] = next[i];
  }
}

// The sum of the lanes of each of LANES vectors, in their order.
INLINE vf sums(vf rows[LANES]) {
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++)
      rows[i] = __builtin_shufflevector(rows[i], rows[i + half], FIRST) +
                __builtin_shufflevector(rows[i], rows[i + half], LAST);
  return rows[0];
}

// Asks for the line of memory at p, which is read soon, into the second cache. The machine's own
// prefetching follows rows of a page and more; of shorter ones it finds the next too late.
INLINE void soon(const void *p) { __builtin_prefetch(p, 0, 2); }
enum { LINE = 64 };

// The first `count` < LANES numbers at p as floats, zeros after them.
#if LANES == 16
INLINE vf load_part(const float *p, size_t count) {
  return (vf)_mm512_maskz_loadu_ps((1u << count) - 1, p);
}
INLINE vf load_part_bf16(const uint16_t *p, size_t count) {
  const vu16 half = (vu16)_mm256_maskz_loadu_epi16((1u << count) - 1, p);
  return load_bf16((const uint16_t *)&half);
}
INLINE vf load_part_f16(const _Float16 *p, size_t count) {
  const vh half = (vh)_mm256_maskz_loadu_epi16((1u << count) - 1, p);
  return load_f16((const _Float16 *)&half);
}
INLINE vf load_part_u8(const uint8_t *p, size_t count) {
  const vu8 bytes = (vu8)_mm_maskz_loadu_epi8((1u << count) - 1, p);
  return load_u8((const uint8_t *)&bytes);
}
#else
#define LOAD_PART(END, NAME, TYPE)                                                                 \
  INLINE vf load_part##END(const TYPE *p, size_t count) {                                          \
    float all[LANES] = {0};                                                                        \
    for (size_t i = 0; i < count; i++) all[i] = one_##NAME(p + i);                                 \
    return load_f32(all);                                                                          \
  }
LOAD_PART(, f32, float)
LOAD_PART(_bf16, bf16, uint16_t)
LOAD_PART(_f16, f16, _Float16)
LOAD_PART(_u8, u8, uint8_t)
#endif

// The first `count` <= LANES words of four bytes of LANES rows, `bytes` apart, transposed: words[i]
// has word i of each row. Zeros where there is none, and in the rows from number `rows` on.
INLINE void transposed_words(const void *p, size_t bytes, size_t count, size_t rows,
                             vf words[LANES]) {
  const char *row = p;
  for (size_t i = 0; i < LANES; i++, row += bytes)
    words[i] = i >= rows        ? zero()
               : count == LANES ? load_f32((const float *)row)
                                : load_part((const float *)row, count);
  transpose(words);
}

INLINE void store_part(float *p, vf x, size_t count) {
  float all[LANES];
  store(all, x);
  for (size_t i = 0; i < count; i++) p[i] = all[i];
}

// a where the mask is -1, b where it is 0.
INLINE vf choose(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

// e^x within 1.2e-7 of it: 2^n e^r, |r| <= ln 2 / 2, by the polynomial of Cephes' expf. Below -87.3
// it is 0, above 88.37 it is 2.4e38; NaN stays NaN.
INLINE vf vexp(vf x) {
  const vf low = splat(-87.3f), high = splat(88.37f), whole = splat(12582912.0f);  // 1.5 * 2^23
  const vf y = choose(x < low, low, choose(x > high, high, x));
  const vf shifted = y * splat(1.44269504f) + whole, n = shifted - whole;  // n in the low bits
  const vf r = (y - n * splat(0.693359375f)) + n * splat(2.12194440e-4f);
  vf p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * (r * r) + r + splat(1.0f);
  const vu exponent = ((vu)shifted - (vu)whole + 127) << 23;
  return choose(x < low, zero(), p * (vf)exponent);
}

// The sum of a[i] b[i].
INLINE float dot(const float *a, const float *b, size_t count) {
  vf total = zero();
  size_t i = 0;
  for (; i + LANES <= count; i += LANES) total += load_f32(a + i) * load_f32(b + i);
  if (i < count) total += load_part(a + i, count - i) * load_part(b + i, count - i);
  return sum(total);
}

INLINE vf vsigmoid(vf x) { return splat(1.0f) / (splat(1.0f) + vexp(-x)); }
