// Checkpoints (sections 2 to 5 of the specification).

import { UcfError, anything, count, either, integer, listOf, mapOf, members, need, nothing, parse, pattern, refuse, text } from "./json.js";
import { checkValue } from "./values.js";
import { hex, xxh3 } from "./xxh3.js";

const BYTES = { C128: 16 };
for (const [bytes, names] of [
  [1, "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0 F4 F6_E2M3 F6_E3M2"],
  [2, "U16 I16 F16 BF16"],
  [4, "U32 I32 F32 C32"],
  [8, "U64 I64 F64 C64"],
]) {
  for (const name of names.split(" ")) BYTES[name] = bytes;
}
const PACKED = { F4: [2, 1], F6_E2M3: [4, 3], F6_E3M2: [4, 3] }; // so many numbers of a header are so many items
const PAIRED = { C32: "F16", C128: "F64" }; // stored as pairs of these
const MAX_ITEMS = 2 ** 59;
const isDtype = (x) => typeof x === "string" && Object.hasOwn(BYTES, x);

const digest = pattern(/^[0-9a-f]{16}$/);
const optionalText = either(nothing, digest);
const FILE = { file: text, size: count, digest };
const SIZES = { file: text, size: count, data_start: count, table_start: count, header_digest: digest };
const SHARED = { block_bytes: count, values: anything, "aliases?": mapOf(text), "mesh?": mapOf(integer), "created?": text };
const RECORD = members({
  ...SHARED,
  index: members(FILE),
  shards: listOf(members({ ...SIZES, table_digest: digest })),
  "step?": either(nothing, count),
  "origin?": text,
  "remarks?": listOf(text),
  "origin_layout?": mapOf(text),
  "companions?": listOf(members(FILE)),
  "writer?": text,
});
export const SLOT = members({
  ...SIZES,
  ...SHARED,
  version: text,
  step: count,
  rank: count,
  world: count,
  "run?": text,
  "table_digest?": optionalText,
  "coords?": either(nothing, mapOf(integer)),
});
const ROLLBACK = members({ passed_over: listOf(integer) });
const ENTRY = members({ dtype: text, shape: listOf(count), data_offsets: listOf(count) });
const NOTE = members({
  version: pattern(/^1(\.|$)/),
  block_bytes: count,
  entries: mapOf(members({ tensor: text, dtype: text, shape: listOf(count), offset: listOf(count) })),
});
const COLUMNS = ["name", "name_bytes", "dtype", "ndim", "shape", "fragments"].map((name) => `tensor.${name}`);
COLUMNS.push(...["shard", "start", "offset", "length"].map((name) => `fragment.${name}`));

export const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
const ascending = (list, before) => list.every((x, i) => i === 0 || before(list[i - 1], x));

/** A number of bytes or items; none of a real file is beyond what JavaScript counts exactly. */
function exact(x, where) {
  const number = Number(x);
  need(Number.isSafeInteger(number), `${where}: ${x} is too large`);
  return number;
}

/** All bytes of a file, or [start, stop) of them; of one that must have `size`. */
async function fetchBytes(source, path, start, stop, size) {
  const found = await source.read(path, start, stop);
  if (found === null) refuse(`${path} is missing`, "missing");
  need(size === undefined || found.size === undefined || found.size === size, `${path} has ${found.size} bytes, not ${size}`);
  const due = Math.min(stop ?? Infinity, size ?? Infinity) - (start ?? 0);
  need(!Number.isFinite(due) || found.data.length === due, `${path} is cut short`);
  return found.data;
}

const RECORD_KEY = new TextEncoder().encode('"record":');

/** Where the first `"record":` of a file begins; -1 where there is none. */
function findRecord(data) {
  let at = data.indexOf(RECORD_KEY[0]);
  while (at >= 0 && !RECORD_KEY.every((byte, k) => data[at + k] === byte)) at = data.indexOf(RECORD_KEY[0], at + 1);
  return at;
}

/** The record in an envelope (section 3). */
export async function unseal(source, path, kind) {
  const data = await fetchBytes(source, path);
  const tree = parse(data, path);
  need(tree instanceof Map && text(tree.get("ucf")), `${path}: no envelope`);
  need(tree.get("ucf").split(".")[0] === "1", `${path}: version ${tree.get("ucf")}`, "version");
  const at = findRecord(data);
  need(digest(tree.get("digest")) && tree.has("record") && at >= 0, `${path}: no envelope`);
  need(hex(data.subarray(at + 9, data.lastIndexOf(0x7d))) === tree.get("digest"), `${path}: digest of the record`, "checksum");
  const record = tree.get("record");
  need(kind(record), `${path}: a member is missing, or of another type`);
  return record;
}

/** A shard's record with numbers, proven to fit together. */
export function shardOf(record, block, where) {
  const shard = { file: record.get("file"), headerDigest: record.get("header_digest"), tableDigest: record.get("table_digest") ?? null };
  for (const [name, key] of [["size", "size"], ["dataStart", "data_start"], ["tableStart", "table_start"]]) shard[name] = exact(record.get(key), where);
  need(block > 0 && block % 4096 === 0, `${where}: block_bytes is ${block}`);
  const room = shard.size - shard.tableStart;
  const words = Math.ceil((shard.tableStart - shard.dataStart) / block);
  need(0 < shard.dataStart && shard.dataStart <= shard.tableStart && room % 8 === 0 && room / 8 >= words, `${where}: sizes of ${shard.file}`);
  return shard;
}

/** Of the first bytes of a safetensors file: its ucf metadata, and name → dtype, shape, start and stop (section 2). */
function header(data, size, where) {
  need(data.length >= 8, `${where}: header`);
  const base = 8 + Number(new DataView(data.buffer, data.byteOffset).getBigUint64(0, true));
  need(base <= Math.min(100_000_008, size, data.length) && data[8] === 0x7b, `${where}: header`);
  const tree = parse(data.subarray(8, base), where);
  const metadata = tree.get("__metadata__");
  need(mapOf(text)(metadata) && metadata.has("ucf"), `${where}: no ucf metadata`);
  tree.delete("__metadata__");
  const note = parse(new TextEncoder().encode(metadata.get("ucf")), where);
  const entries = new Map();
  for (const [name, item] of tree) {
    need(ENTRY(item) && item.get("data_offsets").length === 2 && item.get("shape").length <= 64, `${where}: entry ${name}`);
    const dtype = item.get("dtype");
    need(isDtype(dtype) && !Object.hasOwn(PAIRED, dtype), `${where}: dtype of ${name}`);
    const [numbers, items] = (PACKED[dtype] ?? [1, 1]).map(BigInt);
    const amount = item.get("shape").reduce((a, b) => a * b, 1n);
    const [start, stop] = item.get("data_offsets");
    need(amount % numbers === 0n && (amount / numbers) * items * BigInt(BYTES[dtype]) === stop - start, `${where}: bytes of ${name}`);
    const shape = item.get("shape").map((n) => (amount ? exact(n, where) : Number(n)));
    entries.set(name, { dtype, shape, start: base + exact(start, where), stop: base + exact(stop, where) });
  }
  let end = base;
  for (const entry of [...entries.values()].sort((a, b) => a.start - b.start || a.stop - b.stop)) {
    need(entry.start === end, `${where}: a gap or an overlap at byte ${end}`);
    end = entry.stop;
  }
  need(end === size, `${where}: its entries end at byte ${end} of ${size}`);
  return { note, entries };
}

const WIDTHS = { U8: 1, U16: 2, U32: 4, U64: 8 };

/** The numbers of a column. */
function column(data, entry, where) {
  const width = WIDTHS[entry?.dtype];
  need(width !== undefined, `${where}: a column is missing, or of another dtype`);
  const view = new DataView(data.buffer, data.byteOffset + entry.start, entry.stop - entry.start);
  const get = { 1: "getUint8", 2: "getUint16", 4: "getUint32", 8: "getBigUint64" }[width];
  return Array.from({ length: view.byteLength / width }, (_, i) => exact(view[get](width * i, true), where));
}

/** Boundaries of parts of so many items. */
function cuts(counts) {
  const ends = [0];
  for (const n of counts) ends.push(ends.at(-1) + n);
  return ends;
}

/** A committed checkpoint. `open` makes one. */
export class Checkpoint {
  /** @protected */
  constructor(source, record, shards, block) {
    this.source = source;
    this.record = record;
    this.shards = shards;
    this.block = block;
    this.tensors = new Map();
    this.aliases = new Map(record.get("aliases") ?? []);
    this.values = record.get("values");
    this.verified = true;
    this.passedOver = [];
    this.tables = new Map();
  }

  get step() {
    const step = this.record.get("step") ?? null;
    return step === null ? null : exact(step, "step");
  }

  get mesh() {
    return Object.fromEntries([...(this.record.get("mesh") ?? [])].map(([axis, size]) => [axis, Number(size)]));
  }

  static async open(source, { rebuild = false } = {}) {
    const record = await unseal(source, "ucf.json", RECORD);
    const block = exact(record.get("block_bytes"), "ucf.json");
    const shards = record.get("shards").map((shard) => shardOf(shard, block, "ucf.json"));
    const files = [record.get("index"), ...record.get("shards"), ...(record.get("companions") ?? [])];
    for (const path of files.map((file) => file.get("file"))) {
      const bad = path.split("/").some((part) => ["", ".", ".."].includes(part)) || /[\\\0]/.test(path);
      need(!bad, `path ${JSON.stringify(path)}`);
    }
    need(block % 4096 === 0 && block > 0, `block_bytes is ${block}`);
    checkValue(record.get("values"));
    const made = new Checkpoint(source, record, shards, block);
    await (rebuild ? made.rebuild() : made.readIndex());
    made.checkAliases();
    return made;
  }

  checkAliases() {
    for (const [alias, target] of this.aliases) {
      need(this.tensors.has(target) && !this.tensors.has(alias), `alias ${alias} of nothing, or with the name of a tensor`);
    }
  }

  /** Section 5. */
  async readIndex() {
    const file = this.record.get("index");
    const size = exact(file.get("size"), "ucf.json");
    const data = await fetchBytes(this.source, file.get("file"), undefined, undefined, size);
    need(hex(data) === file.get("digest"), "digest of the index", "checksum");
    const { note, entries } = header(data, data.length, "index");
    need(members({ dtypes: listOf(isDtype) })(note), "index: dtypes");
    const columns = COLUMNS.map((name) => column(data, entries.get(name), "index"));
    const [names, widths, codes, ndims, shapes, counts, shard, start, offset, length] = columns;
    const [nameCuts, shapeCuts, rowCuts] = [widths, ndims, counts].map(cuts);
    const totals = [names.length, shapes.length, shard.length].map((n, i) => n === [nameCuts, shapeCuts, rowCuts][i].at(-1));
    need(totals.every(Boolean) && [codes, ndims, counts].every((x) => x.length === widths.length), "index: columns of tensors");
    const boxes = COLUMNS.slice(-2).map((name) => entries.get(name).shape);
    const ndim = boxes[0][1];
    need(boxes.every((shape) => shape.length === 2 && shape[0] === shard.length && shape[1] === ndim), "index: columns of fragments");
    need(start.length === shard.length && ndim <= 64 && ndims.every((n) => n <= ndim), "index: columns of fragments");
    need(codes.every((code) => code < note.get("dtypes").length), "index: a dtype without a name");
    const text8 = Uint8Array.from(names);
    let before = null;
    for (let i = 0; i < widths.length; i++) {
      const raw = text8.subarray(nameCuts[i], nameCuts[i + 1]);
      need(before === null || compare(before, raw) < 0, "index: names are not unique and ascending");
      before = raw;
      const fragments = [];
      for (let row = rowCuts[i]; row < rowCuts[i + 1]; row++) {
        const box = [offset, length].map((numbers) => numbers.slice(ndim * row, ndim * (row + 1)));
        fragments.push({ shard: shard[row], start: start[row], offset: box[0], length: box[1] });
      }
      this.add(decode(raw), { dtype: note.get("dtypes")[codes[i]], shape: shapes.slice(shapeCuts[i], shapeCuts[i + 1]), fragments });
    }
    this.checkApart();
  }

  /** @protected */
  add(name, tensor) {
    need(product(tensor.shape) < MAX_ITEMS, `${name} has an impossible shape`);
    for (const part of tensor.fragments) {
      const shape = part.offset.map((_, d) => tensor.shape[d] ?? 1);
      need(part.offset.every((o, d) => part.length[d] > 0 && part.length[d] <= shape[d] - o), `${name}: a box`);
      const shard = this.shards[part.shard];
      need(shard !== undefined, `${name}: no such shard`);
      const stop = part.start + product(part.length) * BYTES[tensor.dtype];
      need(shard.dataStart <= part.start && stop <= shard.tableStart, `${name}: bytes outside of the shard's data`);
      part.offset = part.offset.slice(0, tensor.shape.length);
      part.length = part.length.slice(0, tensor.shape.length);
    }
    this.tensors.set(name, tensor);
  }

  checkApart() {
    const ranges = [...this.tensors.values()].flatMap(({ dtype, fragments }) =>
      fragments.map((part) => [part.shard, part.start, part.start + product(part.length) * BYTES[dtype]]),
    );
    ranges.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    need(ascending(ranges, (a, b) => a[0] !== b[0] || a[2] <= b[1]), "fragments share bytes");
  }

  /** Section 4.3. */
  async rebuild() {
    for (const [number, shard] of this.shards.entries()) {
      const data = await fetchBytes(this.source, shard.file, 0, shard.dataStart, shard.size);
      need(hex(data) === shard.headerDigest, `${shard.file}: digest of the header`, "checksum");
      const { note, entries } = header(data, shard.size, shard.file);
      need(NOTE(note) && Number(note.get("block_bytes")) === this.block, `${shard.file}: not the header of this shard`);
      const length = 8 + Number(new DataView(data.buffer, data.byteOffset).getBigUint64(0, true));
      need(length === shard.dataStart, `${shard.file}: its data starts elsewhere`);
      for (const [key, entry] of entries) {
        if (key !== "__ucf__.pad" && key !== "__ucf__.blocks") this.addEntry(number, key, entry, note.get("entries").get(key));
      }
    }
    for (const tensor of this.tensors.values()) this.parts(tensor, tensor.shape.map(() => 0), tensor.shape);
  }

  /** @private */
  addEntry(number, key, entry, said) {
    const numbers = (name, otherwise) => (said ? said.get(name).map((n) => exact(n, key)) : otherwise);
    const name = said ? said.get("tensor") : key;
    const dtype = said ? said.get("dtype") : entry.dtype;
    need(isDtype(dtype) && (PAIRED[dtype] ?? dtype) === entry.dtype, `${key}: dtype`);
    const length = entry.shape.slice(0, entry.shape.length - (dtype in PAIRED ? 1 : 0));
    need(!(dtype in PAIRED) || entry.shape.at(-1) === 2, `${key}: no pairs`);
    const [packed, items] = PACKED[dtype] ?? [1, 1];
    if (packed > 1) {
      need(length.length > 0 && length.at(-1) % packed === 0, `${key}: numbers that are no items`);
      length.push((length.pop() / packed) * items);
    }
    const shape = numbers("shape", length);
    const offset = numbers("offset", length.map(() => 0));
    need(offset.length === length.length && shape.length === length.length, `${key}: dimensions`);
    need(offset.every((o, d) => length[d] <= shape[d] - o), `${key}: a box outside of the shape`);
    const known = this.tensors.get(name);
    const same = known === undefined || (known.dtype === dtype && String(known.shape) === String(shape));
    need(same, `${key}: another dtype or shape than before`, "conflict");
    const fragment = product(length) ? [{ shard: number, start: entry.start, offset, length }] : [];
    this.add(name, { dtype, shape, fragments: [...(known?.fragments ?? []), ...fragment] });
  }

  /**
   * A box of a tensor, all of it by default: its items, row-major and little-endian.
   * @param {string} name
   * @param {{offset?: number[], length?: number[]}} [box]
   */
  async read(name, box = {}) {
    const tensor = this.tensors.get(this.aliases.get(name) ?? name);
    if (tensor === undefined) refuse(`no tensor ${name}`, "missing");
    const offset = box.offset ?? tensor.shape.map(() => 0);
    const length = box.length ?? tensor.shape.map((n, d) => n - offset[d]);
    const inside = offset.length === tensor.shape.length && length.length === offset.length;
    if (!inside || offset.some((o, d) => o < 0 || length[d] < 0 || o + length[d] > tensor.shape[d])) {
      throw new RangeError(`box ${offset} + ${length} is not inside of ${name}, which has shape [${tensor.shape}]`);
    }
    const parts = this.parts(tensor, offset, length);
    const size = BYTES[tensor.dtype];
    const data = new Uint8Array(product(length) * size);
    for (const part of parts) await this.copy(part, size, data, offset, length);
    return { dtype: tensor.dtype, shape: length, data };
  }

  /** The fragments that hold items of a box, proven to cover it once. */
  parts(tensor, offset, length) {
    const found = [];
    for (const fragment of tensor.fragments) {
      const low = offset.map((o, d) => Math.max(o, fragment.offset[d]));
      const high = offset.map((o, d) => Math.min(o + length[d], fragment.offset[d] + fragment.length[d]));
      if (low.every((n, d) => n < high[d])) found.push({ fragment, low, high });
    }
    for (const [i, one] of found.entries()) {
      for (const other of found.slice(0, i)) {
        const apart = one.low.some((n, d) => n >= other.high[d] || other.low[d] >= one.high[d]);
        need(apart, "several fragments hold the same item", "overlap");
      }
    }
    const held = found.reduce((sum, { low, high }) => sum + product(high.map((n, d) => n - low[d])), 0);
    need(held === product(length), "items that no fragment holds", "coverage");
    return found;
  }

  /** @private Copies what a fragment has of a box, row by row. */
  async copy({ fragment, low, high }, size, out, offset, length) {
    const ndim = low.length;
    const position = (index, o, n) => index.reduce((at, i, d) => at * n[d] + i - o[d], 0);
    const first = position(low, fragment.offset, fragment.length);
    const last = position(high.map((n) => n - 1), fragment.offset, fragment.length);
    const stored = await this.bytes(fragment.shard, fragment.start + first * size, fragment.start + (last + 1) * size);
    const run = ndim ? high[ndim - 1] - low[ndim - 1] : 1;
    const index = [...low];
    for (;;) {
      const from = (position(index, fragment.offset, fragment.length) - first) * size;
      out.set(stored.subarray(from, from + run * size), position(index, offset, length) * size);
      let d = ndim - 2;
      while (d >= 0 && ++index[d] === high[d]) index[d] = low[d--];
      if (d < 0) return;
    }
  }

  /** @private Bytes of a shard, of blocks that are verified (section 4.2). */
  async bytes(number, start, stop) {
    const shard = this.shards[number];
    if (shard.tableDigest === null) return fetchBytes(this.source, shard.file, start, stop, shard.size);
    const words = await this.table(number);
    const first = Math.floor((start - shard.dataStart) / this.block);
    const at = shard.dataStart + first * this.block;
    const end = Math.min(shard.tableStart, shard.dataStart + Math.ceil((stop - shard.dataStart) / this.block) * this.block);
    const data = await fetchBytes(this.source, shard.file, at, end, shard.size);
    for (let i = 0; i * this.block < data.length; i++) {
      const block = data.subarray(i * this.block, (i + 1) * this.block);
      need(xxh3(block) === words.getBigUint64(8 * (first + i), true), `${shard.file}: block at byte ${at + i * this.block}`, "checksum");
    }
    return data.subarray(start - at, stop - at);
  }

  /** @private The checksum table of a shard, read once. */
  async table(number) {
    const shard = this.shards[number];
    const data = this.tables.get(number) ?? (await fetchBytes(this.source, shard.file, shard.tableStart, shard.size, shard.size));
    need(hex(data) === shard.tableDigest, `${shard.file}: digest of the checksum table`, "checksum");
    this.tables.set(number, data);
    return new DataView(data.buffer, data.byteOffset, data.byteLength);
  }

  /** Files that travel along: path beside the model → bytes, verified. */
  async companions() {
    const found = new Map();
    for (const item of this.record.get("companions") ?? []) {
      const path = item.get("file");
      const data = await fetchBytes(this.source, path, undefined, undefined, exact(item.get("size"), path));
      need(hex(data) === item.get("digest"), `${path}: digest`, "checksum");
      found.set(path.slice(path.indexOf("/") + 1), data);
    }
    return found;
  }
}

function compare(a, b) {
  for (let i = 0; i < Math.min(a.length, b.length); i++) if (a[i] !== b[i]) return a[i] - b[i];
  return a.length - b.length;
}

function decode(raw) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(raw);
  } catch {
    return refuse("index: a name is not UTF-8");
  }
}

/** The directory of the checkpoint that a run directory stands for (section 2). */
export async function newestStep(source, names) {
  const steps = [];
  for (const name of names) {
    const found = /^step-([0-9]{8}|[1-9][0-9]{8,})$/.exec(name);
    if (found && (await source.list(name)).includes("ucf.json")) steps.push(BigInt(found[1]));
  }
  if (!steps.length) throw new UcfError("not-a-checkpoint", "no ucf.json");
  const rollback = names.includes("rollback.json") ? await unseal(source, "rollback.json", ROLLBACK) : null;
  const last = rollback ? rollback.get("passed_over") : [];
  const meant = steps.filter((step) => !last.includes(step));
  const newest = (meant.length ? meant : steps).reduce((a, b) => (a > b ? a : b));
  return `step-${String(newest).padStart(8, "0")}`;
}
