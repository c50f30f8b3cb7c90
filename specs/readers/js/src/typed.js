// Items as typed arrays. What JavaScript has no type for is converted exactly to Float32Array, or stays bytes.

const TYPES = {
  BOOL: Uint8Array, U8: Uint8Array, I8: Int8Array, U16: Uint16Array, I16: Int16Array, U32: Uint32Array, I32: Int32Array,
  U64: BigUint64Array, I64: BigInt64Array, F32: Float32Array, F64: Float64Array, C64: Float32Array, C128: Float64Array,
};

function fromHalf(bits) {
  const [sign, exponent, fraction] = [bits >> 15 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

/** A float of 8 bits: bits of exponent and fraction, its bias, and which bit patterns are no number. */
function fromByte(bits, fractionBits, bias, isNan, isInf) {
  if (isNan(bits)) return NaN;
  const sign = bits >> 7 ? -1 : 1;
  if (isInf(bits)) return sign * Infinity;
  const [exponent, fraction] = [(bits & 127) >> fractionBits, (bits & ((1 << fractionBits) - 1)) / (1 << fractionBits)];
  return sign * (exponent ? 2 ** (exponent - bias) * (1 + fraction) : 2 ** (1 - bias) * fraction);
}

const never = () => false;
const FLOATS = {
  F8_E4M3: (b) => fromByte(b, 3, 7, (x) => (x & 127) === 127, never),
  F8_E5M2: (b) => fromByte(b, 2, 15, (x) => (x & 127) > 124, (x) => (x & 127) === 124),
  F8_E4M3FNUZ: (b) => fromByte(b, 3, 8, (x) => x === 128, never),
  F8_E5M2FNUZ: (b) => fromByte(b, 2, 16, (x) => x === 128, never),
  F8_E8M0: (b) => (b === 255 ? NaN : 2 ** (b - 127)),
};

/**
 * Items that `Checkpoint.read` returned, as numbers: F16, BF16 and F8_* as Float32Array, C32, C64 and C128 as pairs.
 * Packed dtypes (F4, F6_*) stay bytes.
 */
export function toTypedArray({ dtype, data }) {
  const aligned = data.byteOffset % 8 ? data.slice() : data;
  const Type = TYPES[dtype];
  if (Type) return new Type(aligned.buffer, aligned.byteOffset, aligned.byteLength / Type.BYTES_PER_ELEMENT);
  const halves = new Uint16Array(aligned.buffer, aligned.byteOffset, aligned.byteLength >> 1);
  if (dtype === "BF16") return new Float32Array(Uint32Array.from(halves, (bits) => bits << 16).buffer);
  if (dtype === "F16" || dtype === "C32") return Float32Array.from(halves, fromHalf);
  return FLOATS[dtype] ? Float32Array.from(aligned, FLOATS[dtype]) : aligned;
}
