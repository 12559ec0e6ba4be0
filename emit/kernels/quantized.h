// Scales and offsets of quantised weights (emit/packed.py), and tables of sixteen numbers.
#pragma once
#include "simd.h"

// What an offset is.
#define NONE 0
#define BIAS 1
#define ZERO 2

INLINE vf splat_f32(const void *p, size_t i) { return splat(((const float *)p)[i]); }
INLINE vf splat_bf16(const void *p, size_t i) { return splat(one_bf16((const uint16_t *)p + i)); }
INLINE vf splat_f16(const void *p, size_t i) { return splat(one_f16((const _Float16 *)p + i)); }

// `count` <= LANES of them from the i-th on, zeros after them.
#define SOME(NAME, END, TYPE)                                                                      \
  INLINE vf some_##NAME(const void *p, size_t i, size_t count) {                                   \
    const TYPE *from = (const TYPE *)p + i;                                                        \
    return count < LANES ? load_part##END(from, count) : load_##NAME(from);                        \
  }
SOME(f32, , float)
SOME(bf16, _bf16, uint16_t)
SOME(f16, _f16, _Float16)
SOME(u8, _u8, uint8_t)

// What all codes of one group need.
typedef struct { vf scale, bias, zero; } group_of;

// The number of code q, in the order of operations that emit/packed.py states.
INLINE vf dequantized(vf q, const group_of *g, const int offset) {
  if (offset == ZERO) return (q - g->zero) * g->scale;
  return offset == BIAS ? q * g->scale + g->bias : q * g->scale;
}

// Sixteen numbers, looked up by the low four bits of each lane.
#if LANES == 16
typedef struct { vf all; } table16;
INLINE table16 load16(const float *p) { return (table16){load_f32(p)}; }
INLINE vf lookup(const table16 *t, vi code) {
  return (vf)_mm512_permutexvar_ps((__m512i)code, (__m512)t->all);
}
#define EACH16(t, F) ((table16){F((t).all)})
#elif LANES == 8
typedef struct { vf low, high; } table16;
INLINE table16 load16(const float *p) { return (table16){load_f32(p), load_f32(p + 8)}; }
INLINE vf lookup(const table16 *t, vi code) {
  const __m256 low = _mm256_permutevar8x32_ps((__m256)t->low, (__m256i)code);
  const __m256 high = _mm256_permutevar8x32_ps((__m256)t->high, (__m256i)code);
  return (vf)_mm256_blendv_ps(low, high, (__m256)(code << 28));
}
#define EACH16(t, F) ((table16){F((t).low), F((t).high)})
#else
typedef struct { vf part[4]; } table16;
INLINE table16 load16(const float *p) {
  return (table16){{load_f32(p), load_f32(p + 4), load_f32(p + 8), load_f32(p + 12)}};
}
INLINE vf lookup(const table16 *t, vi code) {
  // Bytes 4 q to 4 q + 3 of the 64 of the table.
  const vi bytes = (code & 15) * 0x04040404 + 0x03020100;
  const uint8x16x4_t all = {{(uint8x16_t)t->part[0], (uint8x16_t)t->part[1],
                             (uint8x16_t)t->part[2], (uint8x16_t)t->part[3]}};
  return (vf)vqtbl4q_u8(all, (uint8x16_t)bytes);
}
#define EACH16(t, F) ((table16){{F((t).part[0]), F((t).part[1]), F((t).part[2]), F((t).part[3])}})
#endif

// The numbers that the sixteen codes stand for.
INLINE table16 dequantized16(table16 t, const group_of *g, const int offset) {
#define NUMBER(q) dequantized(q, g, offset)
  return EACH16(t, NUMBER);
#undef NUMBER
}
