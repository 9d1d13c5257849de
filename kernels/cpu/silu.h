/* SwiGLU's activation. */
#pragma once
#include "vec.h"

INLINE vf silu(vf x) {
    vf bounded = vselect(x < -87.0f, vset(-87.0f), vselect(x > 87.0f, vset(87.0f), x));
    return vselect(x < -87.0f, vset(0), x / (vset(1.0f) + vexp(-bounded))); /* e^87 is nearly as large as float32 gets */
}

INLINE vf silu_mul(vf gate, vf up, int half) {
    vf g = silu(gate);
    return (half ? vround_bf16(g) : g) * up;
}
