// Value trees (section 6 of the specification), and those of several ranks merged (section 7.3).

import { anything, either, integer, listOf, mapOf, members, need, nothing, pattern, refuse, stringify, text } from "./json.js";

const SIZES = { bool: 1, float16: 2, float32: 4, float64: 8, complex64: 8, complex128: 16 };
for (const bytes of [1, 2, 4, 8]) SIZES[`int${8 * bytes}`] = SIZES[`uint${8 * bytes}`] = bytes;
const BASE64 = /^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$/;
const PATHS = ["PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"];
const MUTABLE = ["$dict", "$ordered", "$set", "$namespace"];
const FLAT = ["$bytes", "$complex", "$int", "$float", "$str"];

const tagged = (tag) => (x) => x instanceof Map && x.size === 1 && x.has(tag);
const string = either(text, tagged("$str"));
const float = either((x) => typeof x === "number", tagged("$float"));
const bytesOf = (x) => (text(x) && BASE64.test(x) ? Uint8Array.from(atob(x), (c) => c.charCodeAt(0)) : null);
const of = (size, kind) => (x) => listOf(kind)(x) && x.length === size;
const noTwins = (items) => new Set(items.map(keyOf)).size === items.length;
const pairs = (x) => listOf(of(2, anything))(x) && noTwins(x.map((pair) => pair[0]));
const items = (x) => Array.isArray(x) && noTwins(x);

/** Whether bytes are UTF-8, but for halves of characters, which may be there. */
function isWideUtf8(x) {
  const data = bytesOf(x);
  if (data === null) return false;
  for (let i = 0; i < data.length; ) {
    const lead = data[i];
    const size = lead < 0x80 ? 1 : lead >= 0xc2 && lead < 0xe0 ? 2 : lead >= 0xe0 && lead < 0xf0 ? 3 : lead >= 0xf0 && lead < 0xf5 ? 4 : 0;
    if (size === 0 || i + size > data.length) return false;
    for (let k = 1; k < size; k++) if ((data[i + k] & 0xc0) !== 0x80) return false;
    if ((lead === 0xe0 && data[i + 1] < 0xa0) || (lead === 0xf0 && data[i + 1] < 0x90) || (lead === 0xf4 && data[i + 1] > 0x8f)) return false;
    i += size;
  }
  return true;
}

function isRankLocal(x) {
  const kind = members({ policy: string, coords: listOf(either(nothing, mapOf(integer))), values: Array.isArray, "first?": integer });
  return kind(x) && x.size === 3 + x.has("first") && x.get("coords").length === x.get("values").length;
}

const TAGS = {
  $tuple: Array.isArray,
  $dict: pairs,
  $ordered: pairs,
  $set: items,
  $frozenset: items,
  $int: pattern(/^-?0x[0-9a-fA-F]+$/),
  $float: pattern(/^(nan|-?inf)$/),
  $complex: of(2, float),
  $bytes: (x) => bytesOf(x) !== null,
  $str: isWideUtf8,
  $numpy: (x) => of(2, text)(x) && Object.hasOwn(SIZES, x[0]) && bytesOf(x[1])?.length === SIZES[x[0]],
  $size: listOf(integer),
  $dtype: pattern(/^[a-z0-9_]+$/),
  $device: pattern(/^[a-z]+(:[0-9]+)?$/),
  $path: (x) => of(2, string)(x) && PATHS.includes(x[0]),
  $namespace: (x) => x instanceof Map && !tagOf(x),
  $tensor: string,
  $array: string,
  $rank_local: isRankLocal,
  $opaque: (x) => members({ class: string, state: anything })(x) && x.size === 2,
};

const tagOf = (x) => [...x.keys()].find((key) => key.startsWith("$")) ?? "";

/** The same tree. Refuses what section 6 does not allow. */
export function checkValue(x) {
  if (Array.isArray(x)) x.forEach(checkValue);
  if (!(x instanceof Map)) return x;
  for (const item of x.values()) checkValue(item);
  const tag = tagOf(x);
  if (tag) {
    need(x.size === 1 && Object.hasOwn(TAGS, tag), `values: unknown tag ${tag}, or members beside it`);
    need(TAGS[tag](x.get(tag)), `values: content of ${tag}`);
  }
  return x;
}

let nans = 0;
const numberKey = (x) => {
  if (typeof x === "bigint") return `n${x}`;
  if (Number.isNaN(x)) return `nan${nans++}`;
  return Number.isInteger(x) ? `n${BigInt(x)}` : `n${x}`;
};

/** A string that is equal for two keys, or items of a set, that are the same. */
function keyOf(x) {
  if (x === null) return "null";
  if (typeof x === "boolean") return numberKey(x ? 1n : 0n);
  if (typeof x === "number" || typeof x === "bigint") return numberKey(x);
  if (typeof x === "string") return `s${JSON.stringify(x)}`;
  const [tag, body] = x instanceof Map && x.size ? [...x][0] : ["", null];
  need(Object.hasOwn(TAGS, tag) && !MUTABLE.includes(tag), `values: ${tag || "an array or object"} in a key or set`);
  if (tag === "$float") return numberKey({ nan: NaN, inf: Infinity, "-inf": -Infinity }[body]);
  if (tag === "$int") return numberKey(body.startsWith("-") ? -BigInt(body.slice(1)) : BigInt(body));
  let parts = body;
  if (tag === "$opaque") parts = [body.get("class"), body.get("state")];
  if (tag === "$rank_local") {
    need(!body.get("coords").some((place) => place?.size), "values: an object in a key or set");
    parts = body.get("values");
  }
  if (!Array.isArray(parts)) return `${tag}${JSON.stringify(parts)}`;
  const keys = parts.map(keyOf);
  return `${tag}${JSON.stringify(tag === "$frozenset" ? keys.sort() : keys)}`;
}

const isFlat = (list) => !list.some((x) => Array.isArray(x) || (x instanceof Map && !FLAT.includes(tagOf(x))));
const unique = (list) => [...new Set(list)];

/** The trees of the ranks that have one at a place, as one. */
export function merge(trees, key = "", inTag = false) {
  if (trees.every(tagged("$rank_local"))) {
    const bodies = trees.map((x) => x.get("$rank_local"));
    need(unique(bodies.map((body) => stringify(body.get("policy")))).length === 1, `policies of ${key} differ`, "conflict");
    const strung = ["coords", "values"].map((name) => [name, bodies.flatMap((body) => body.get(name))]);
    return new Map([["$rank_local", new Map([["policy", bodies[0].get("policy")], ...strung])]]);
  }
  if (unique(trees.map(stringify)).length === 1) return trees[0];
  if (trees.every(Array.isArray)) {
    const lengths = trees.map((x) => x.length);
    if (key === "param_groups" && !inTag) {
      return Array.from({ length: Math.max(...lengths) }, (_, i) => mergeGroup(trees.filter((x) => i < x.length).map((x) => x[i])));
    }
    if (unique(lengths).length === 1 && !trees.every(isFlat)) return trees[0].map((_, i) => merge(trees.map((x) => x[i])));
  }
  if (trees.every((x) => x instanceof Map)) {
    const tags = unique(trees.map(tagOf));
    const tag = tags.length === 1 ? tags[0] : "none in common";
    if (tag === "") {
      const names = unique(trees.flatMap((x) => [...x.keys()]));
      return new Map(names.map((name) => [name, merge(trees.filter((x) => x.has(name)).map((x) => x.get(name)), name)]));
    }
    if (tag === "$tuple" || tag === "$namespace") return new Map([[tag, merge(trees.map((x) => x.get(tag)), "", true)]]);
    if (tag === "$dict" || tag === "$ordered") {
      const found = new Map();
      for (const [name, item] of trees.flatMap((x) => x.get(tag))) {
        const held = found.get(keyOf(name)) ?? { name, items: [] };
        found.set(keyOf(name), held);
        held.items.push(item);
      }
      return new Map([[tag, [...found.values()].map((held) => [held.name, merge(held.items, held.name)])]]);
    }
  }
  return refuse(`ranks differ about ${key}`, "conflict");
}

function mergeGroup(groups) {
  if (!groups.every((x) => x instanceof Map && Array.isArray(x.get("params")))) return merge(groups);
  const names = new Map(groups.flatMap((x) => x.get("params").map((name) => [stringify(name), name])));
  return merge(groups.map((x) => new Map(x).set("params", [...names.values()])));
}

/**
 * Value trees as plain JavaScript: objects, and numbers where integers are safe. Tags stay objects with one member.
 * Members that JavaScript would put in another order, or that hide a prototype, make the object a Map.
 */
export function plain(x) {
  if (typeof x === "bigint") return x >= BigInt(Number.MIN_SAFE_INTEGER) && x <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(x) : x;
  if (Array.isArray(x)) return x.map(plain);
  if (!(x instanceof Map)) return x;
  const entries = [...x].map(([key, item]) => [key, plain(item)]);
  return entries.some(([key]) => key === "__proto__" || /^\d+$/.test(key)) ? new Map(entries) : Object.fromEntries(entries);
}
