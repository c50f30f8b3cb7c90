// XXH3, 64 bits, seed 0. Long inputs are hashed with 32-bit arithmetic, the rest with BigInt.

const SECRET = Uint8Array.from(
  (
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c" +
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364" +
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
  )
    .match(/../g)
    .map((byte) => parseInt(byte, 16)),
);
const secretView = new DataView(SECRET.buffer);
const MASK = (1n << 64n) - 1n;
const P32_1 = 0x9e3779b1n;
const P32_2 = 0x85ebca77n;
const P32_3 = 0xc2b2ae3dn;
const P64_1 = 0x9e3779b185ebca87n;
const P64_2 = 0xc2b2ae3d27d4eb4fn;
const P64_3 = 0x165667b19e3779f9n;
const P64_4 = 0x85ebca77c2b2ae63n;
const P64_5 = 0x27d4eb2f165667c5n;
const MX1 = 0x165667919e3779f9n;
const MX2 = 0x9fb21c651e98df25n;
const STRIPE = 64;
const PER_BLOCK = (SECRET.length - STRIPE) / 8; // stripes before the accumulators are scrambled

const s64 = (at) => secretView.getBigUint64(at, true);
const s32 = (at) => BigInt(secretView.getUint32(at, true));

function fold(a, b) {
  const product = a * b;
  return (product & MASK) ^ (product >> 64n);
}

function avalanche(h) {
  h ^= h >> 37n;
  h = (h * MX1) & MASK;
  return h ^ (h >> 32n);
}

function avalanche64(h) {
  h ^= h >> 33n;
  h = (h * P64_2) & MASK;
  h ^= h >> 29n;
  h = (h * P64_3) & MASK;
  return h ^ (h >> 32n);
}

function swap64(x) {
  let out = 0n;
  for (let i = 0; i < 8; i++) out = (out << 8n) | ((x >> BigInt(8 * i)) & 255n);
  return out;
}

function upTo16(view, n) {
  if (n > 8) {
    const low = view.getBigUint64(0, true) ^ (s64(24) ^ s64(32));
    const high = view.getBigUint64(n - 8, true) ^ (s64(40) ^ s64(48));
    return avalanche((BigInt(n) + swap64(low) + high + fold(low, high)) & MASK);
  }
  if (n >= 4) {
    const first = BigInt(view.getUint32(0, true));
    const last = BigInt(view.getUint32(n - 4, true));
    let h = (last + (first << 32n)) ^ (s64(8) ^ s64(16));
    h ^= (((h << 49n) | (h >> 15n)) ^ ((h << 24n) | (h >> 40n))) & MASK;
    h = (h * MX2) & MASK;
    h ^= (h >> 35n) + BigInt(n);
    h = (h * MX2) & MASK;
    return h ^ (h >> 28n);
  }
  if (n > 0) {
    const [a, b, c] = [view.getUint8(0), view.getUint8(n >> 1), view.getUint8(n - 1)].map(BigInt);
    return avalanche64(((a << 16n) | (b << 24n) | c | (BigInt(n) << 8n)) ^ (s32(0) ^ s32(4)));
  }
  return avalanche64(s64(56) ^ s64(64));
}

function mix16(view, at, secret) {
  return fold(view.getBigUint64(at, true) ^ s64(secret), view.getBigUint64(at + 8, true) ^ s64(secret + 8));
}

function upTo128(view, n) {
  let h = BigInt(n) * P64_1;
  for (let i = (n - 1) >> 5; i >= 0; i--) {
    h += mix16(view, 16 * i, 32 * i) + mix16(view, n - 16 * (i + 1), 32 * i + 16);
  }
  return avalanche(h & MASK);
}

function upTo240(view, n) {
  let h = BigInt(n) * P64_1;
  for (let i = 0; i < 8; i++) h += mix16(view, 16 * i, 16 * i);
  h = avalanche(h & MASK);
  for (let i = 8; i < n >> 4; i++) h += mix16(view, 16 * i, 16 * (i - 8) + 3);
  return avalanche((h + mix16(view, n - 16, 136 - 17)) & MASK);
}

/** Adds a stripe to the accumulators, pairs of 32-bit words. */
function accumulate(acc, view, at, secret) {
  for (let lane = 0; lane < 8; lane++) {
    const low = view.getUint32(at + 8 * lane, true);
    const high = view.getUint32(at + 8 * lane + 4, true);
    const a = (low ^ secretView.getUint32(secret + 8 * lane, true)) >>> 0;
    const b = (high ^ secretView.getUint32(secret + 8 * lane + 4, true)) >>> 0;
    const other = 2 * (lane ^ 1);
    let sum = acc[other] + low;
    acc[other] = sum;
    acc[other + 1] += high + (sum > 0xffffffff ? 1 : 0);
    const [al, ah, bl, bh] = [a & 0xffff, a >>> 16, b & 0xffff, b >>> 16];
    const p0 = al * bl;
    const p1 = al * bh;
    const p2 = ah * bl;
    const middle = (p0 >>> 16) + (p1 & 0xffff) + (p2 & 0xffff);
    sum = acc[2 * lane] + (((middle << 16) | (p0 & 0xffff)) >>> 0);
    acc[2 * lane] = sum;
    acc[2 * lane + 1] += ah * bh + (p1 >>> 16) + (p2 >>> 16) + (middle >>> 16) + (sum > 0xffffffff ? 1 : 0);
  }
}

const lanes = (acc) => Array.from({ length: 8 }, (_, i) => (BigInt(acc[2 * i + 1]) << 32n) | BigInt(acc[2 * i]));

function scramble(acc) {
  lanes(acc).forEach((x, i) => {
    const h = ((x ^ (x >> 47n) ^ s64(SECRET.length - STRIPE + 8 * i)) * P32_1) & MASK;
    acc[2 * i] = Number(h & 0xffffffffn);
    acc[2 * i + 1] = Number(h >> 32n);
  });
}

function long(view, n) {
  const acc = new Uint32Array(16);
  [P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1].forEach((x, i) => {
    acc[2 * i] = Number(x & 0xffffffffn);
    acc[2 * i + 1] = Number(x >> 32n);
  });
  const stripes = Math.floor((n - 1) / STRIPE);
  for (let i = 0; i < stripes; i++) {
    accumulate(acc, view, STRIPE * i, 8 * (i % PER_BLOCK));
    if (i % PER_BLOCK === PER_BLOCK - 1) scramble(acc);
  }
  accumulate(acc, view, n - STRIPE, SECRET.length - STRIPE - 7);
  const found = lanes(acc);
  let h = BigInt(n) * P64_1;
  for (let i = 0; i < 4; i++) h += fold(found[2 * i] ^ s64(11 + 16 * i), found[2 * i + 1] ^ s64(19 + 16 * i));
  return avalanche(h & MASK);
}

/**
 * The 64-bit XXH3 hash, seed 0.
 * @param {Uint8Array} data
 * @returns {bigint}
 */
export function xxh3(data) {
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  const n = data.byteLength;
  if (n <= 16) return upTo16(view, n);
  if (n <= 128) return upTo128(view, n);
  return n <= 240 ? upTo240(view, n) : long(view, n);
}

/** The same as 16 hexadecimal digits. */
export const hex = (data) => xxh3(data).toString(16).padStart(16, "0");
