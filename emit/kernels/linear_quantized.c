// y = x w^T: x f32[M, K] and quantised weights [O, K] (emit/packed.py), in float32 arithmetic on the
// very numbers that the codes stand for. Tiles and loops as in linear.c.
//
// scanwright_linear_q<bits>_<scales>_<offsets>: codes u8[O, K bits / 8], scales and offsets
// [O, K / group], table f32[16] of four-bit codes; `int` says that codes of eight bits have a sign.
// What there is not is any pointer. `group` is a multiple of 32. scanwright_experts_q… are to
// these what linear.c's are to its own.
//
// A byte holds two codes of four bits, the low one of an even input and the high one of the odd input
// after it.
#include "integers.h"
#include "product.h"
#include "quantized.h"

enum { MOST_APART = 16384 };  // inputs of all rows that are put in another order at a time

// Weight rows at a time; each keeps its sixteen numbers in registers, too.
#if LANES == 8
#define TOGETHER_CODES(M) ((M) > 2 ? 1 : 2)
#else
#define TOGETHER_CODES(M) ((M) == 1 ? 8 : (M) == 2 ? 4 : (M) < 7 ? 3 : 2)
#endif

typedef struct {
  const uint8_t *codes;
  const void *scales, *offsets;
  table16 table;
  size_t group, K, groups, bytes;  // the last two of a row
} weights;

#define NAME(x) x##_q4_f32_none
#define BITS 4
#define SCALE splat_f32
#define SCALES some_f32
#define SCALE_BYTES 4
#define OFFSET NONE
#include "linear_quantized.inc"

#define NAME(x) x##_q4_f32_bias
#define BITS 4
#define SCALE splat_f32
#define SCALES some_f32
#define SCALE_BYTES 4
#define OFFSET BIAS
#include "linear_quantized.inc"

#define NAME(x) x##_q4_f32_zero
#define BITS 4
#define SCALE splat_f32
#define SCALES some_f32
#define SCALE_BYTES 4
#define OFFSET ZERO
#include "linear_quantized.inc"

#define NAME(x) x##_q8_f32_none
#define BITS 8
#define SCALE splat_f32
#define SCALES some_f32
#define SCALE_BYTES 4
#define OFFSET NONE
#define SIGNED 0
#include "linear_quantized.inc"

#define NAME(x) x##_q8_f32_bias
#define BITS 8
#define SCALE splat_f32
#define SCALES some_f32
#define SCALE_BYTES 4
#define OFFSET BIAS
#define SIGNED 0
#include "linear_quantized.inc"

#define NAME(x) x##_q8_f32_zero
#define BITS 8
#define SCALE splat_f32
#define SCALES some_f32
#define SCALE_BYTES 4
#define OFFSET ZERO
#define SIGNED 0
#include "linear_quantized.inc"

#define NAME(x) x##_q8_f32_int
#define BITS 8
#define SCALE splat_f32
#define SCALES some_f32
#define SCALE_BYTES 4
#define OFFSET NONE
#define SIGNED 1
#include "linear_quantized.inc"

#define NAME(x) x##_q4_bf16_none
#define BITS 4
#define SCALE splat_bf16
#define SCALES some_bf16
#define SCALE_BYTES 2
#define OFFSET NONE
#include "linear_quantized.inc"

#define NAME(x) x##_q4_bf16_bias
#define BITS 4
#define SCALE splat_bf16
#define SCALES some_bf16
#define SCALE_BYTES 2
#define OFFSET BIAS
#include "linear_quantized.inc"

#define NAME(x) x##_q4_bf16_zero
#define BITS 4
#define SCALE splat_bf16
#define SCALES some_bf16
#define SCALE_BYTES 2
#define OFFSET ZERO
#include "linear_quantized.inc"

#define NAME(x) x##_q8_bf16_none
#define BITS 8
#define SCALE splat_bf16
#define SCALES some_bf16
#define SCALE_BYTES 2
#define OFFSET NONE
#define SIGNED 0
#include "linear_quantized.inc"

#define NAME(x) x##_q8_bf16_bias
#define BITS 8
#define SCALE splat_bf16
#define SCALES some_bf16
#define SCALE_BYTES 2
#define OFFSET BIAS
#define SIGNED 0
#include "linear_quantized.inc"

#define NAME(x) x##_q8_bf16_zero
#define BITS 8
#define SCALE splat_bf16
#define SCALES some_bf16
#define SCALE_BYTES 2
#define OFFSET ZERO
#define SIGNED 0
#include "linear_quantized.inc"

#define NAME(x) x##_q8_bf16_int
#define BITS 8
#define SCALE splat_bf16
#define SCALES some_bf16
#define SCALE_BYTES 2
#define OFFSET NONE
#define SIGNED 1
#include "linear_quantized.inc"

#define NAME(x) x##_q4_f16_none
#define BITS 4
#define SCALE splat_f16
#define SCALES some_f16
#define SCALE_BYTES 2
#define OFFSET NONE
#include "linear_quantized.inc"

#define NAME(x) x##_q4_f16_bias
#define BITS 4
#define SCALE splat_f16
#define SCALES some_f16
#define SCALE_BYTES 2
#define OFFSET BIAS
#include "linear_quantized.inc"

#define NAME(x) x##_q4_f16_zero
#define BITS 4
#define SCALE splat_f16
#define SCALES some_f16
#define SCALE_BYTES 2
#define OFFSET ZERO
#include "linear_quantized.inc"

#define NAME(x) x##_q8_f16_none
#define BITS 8
#define SCALE splat_f16
#define SCALES some_f16
#define SCALE_BYTES 2
#define OFFSET NONE
#define SIGNED 0
#include "linear_quantized.inc"

#define NAME(x) x##_q8_f16_bias
#define BITS 8
#define SCALE splat_f16
#define SCALES some_f16
#define SCALE_BYTES 2
#define OFFSET BIAS
#define SIGNED 0
#include "linear_quantized.inc"

#define NAME(x) x##_q8_f16_zero
#define BITS 8
#define SCALE splat_f16
#define SCALES some_f16
#define SCALE_BYTES 2
#define OFFSET ZERO
#define SIGNED 0
#include "linear_quantized.inc"

#define NAME(x) x##_q8_f16_int
#define BITS 8
#define SCALE splat_f16
#define SCALES some_f16
#define SCALE_BYTES 2
#define OFFSET NONE
#define SIGNED 1
#include "linear_quantized.inc"
