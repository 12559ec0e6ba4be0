// RMS norm over each of `groups` equal parts of a row, with a gate before it, after it or none.
//
//   y = norm(x) w          GATE_NONE
//   y = norm(x silu(z)) w  GATE_BEFORE
//   y = norm(x) w silu(z)  GATE_AFTER
//
// x and z are columns of wider rows: row r begins at r * width + start.
#include "gates.h"

enum { GATE_NONE, GATE_BEFORE, GATE_AFTER };

// One part of `size` numbers. The gated x is kept in y between the two passes.
INLINE void norm_part(const float *x, const float *z, const float *w, float *y, size_t size,
                      float eps, int gate) {
  vf squares = zero();
  for (size_t k = 0; k < size; k += LANES) {
    vf v = load_upto(x + k, size - k);
    if (gate == GATE_BEFORE) {
      v *= silu(load_upto(z + k, size - k));
      store_upto(y + k, v, size - k);
    }
    squares += v * v;
  }
  const float *from = gate == GATE_BEFORE ? y : x;
  const vf scale = splat(1.0f / __builtin_sqrtf(sum(squares) / (float)size + eps));
  for (size_t k = 0; k < size; k += LANES) {
    vf v = load_upto(from + k, size - k) * scale;
    if (w) v *= load_upto(w + k, size - k);
    if (gate == GATE_AFTER) v *= silu(load_upto(z + k, size - k));
    store_upto(y + k, v, size - k);
  }
}

// Tile number `tile`: `per` parts of the rows * groups there are. Without `weighted`, w is not read.
EXPORT scanwright_rms_norm(const float *x, const float *z, const float *w, float *y, size_t rows,
                           size_t groups, size_t size, size_t x_width, size_t x_start,
                           size_t z_width, size_t z_start, size_t eps, size_t gate, size_t weighted,
                           size_t per, size_t tile) {
  const size_t from = tile * per, all = rows * groups, to = from + per < all ? from + per : all;
  for (size_t i = from; i < to; i++) {
    const size_t row = i / groups, at = i % groups * size;
    const float *of_x = x + row * x_width + x_start + at, *of_z = z + row * z_width + z_start + at;
    const float *of_w = weighted ? w + at : 0;
    float *out = y + row * groups * size + at;
    if (gate == GATE_BEFORE)
      norm_part(of_x, of_z, of_w, out, size, number(eps), GATE_BEFORE);
    else if (gate == GATE_AFTER)
      norm_part(of_x, of_z, of_w, out, size, number(eps), GATE_AFTER);
    else
      norm_part(of_x, of_z, of_w, out, size, number(eps), GATE_NONE);
  }
}
