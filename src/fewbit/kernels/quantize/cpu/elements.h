// The elements of an array of float32, bfloat16 or float16. Included in the namespace of an instruction set, after simd.h.
//
// The dtype is a value and not a template argument: one compiled loop serves all three, and the branch of each load is the same
// every time.

struct Elements {
  char* data;
  int kind;  // a Kind: kFloat32, kBfloat16 or kFloat16

  INLINE_MEMBER int64_t size() const { return kind == (int)Kind::kFloat32 ? 4 : 2; }
  INLINE_MEMBER Elements From(int64_t i) const { return {data + i * size(), kind}; }
};

INLINE V Load(const Elements& x) {
  if (x.kind == (int)Kind::kFloat32) return Load((const float*)x.data);
  if (x.kind == (int)Kind::kBfloat16) return Load((const Brain*)x.data);
  return Load((const Half*)x.data);
}

INLINE void StoreSome(const Elements& to, V v, int64_t count) {
  if (to.kind == (int)Kind::kFloat32) StoreSome((float*)to.data, v, count);
  else StoreSome((uint16_t*)to.data, to.kind == (int)Kind::kBfloat16 ? ToBrain(v) : ToHalf(v), count);
}
