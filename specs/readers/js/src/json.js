// JSON as the format takes it: strict, objects as Map (their order counts), integers as bigint, other numbers as number.

/** What a reader refuses; `kind` is one of the classes that the specification lists. */
export class UcfError extends Error {
  constructor(kind, message) {
    super(`${kind}: ${message}`);
    this.name = "UcfError";
    this.kind = kind;
  }
}

/** @returns {never} */
export function refuse(message, kind = "format") {
  throw new UcfError(kind, message);
}

export function need(condition, message, kind = "format") {
  if (!condition) refuse(message, kind);
}

const LIMIT = 1n << 63n;
const DEPTH = 1500; // levels of JSON: far more than 128 levels of values take, and well below what the stack holds
const NUMBER = /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;
const PLAIN = /[^"\\\u0000-\u001f]*/y;
const SPACE = /[ \t\n\r]*/y;
const HALVES = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/;
const ESCAPES = { '"': '"', "\\": "\\", "/": "/", b: "\b", f: "\f", n: "\n", r: "\r", t: "\t" };

class Parser {
  constructor(text, where) {
    this.text = text;
    this.where = where;
    this.at = 0;
  }

  fail(why) {
    refuse(`${this.where}: ${why} at character ${this.at}`);
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found) this.at += found[0].length;
    return found;
  }

  take(literal) {
    this.match(SPACE);
    if (!this.text.startsWith(literal, this.at)) return false;
    this.at += literal.length;
    return true;
  }

  whole() {
    const tree = this.value(0);
    this.match(SPACE);
    if (this.at < this.text.length) this.fail("text behind the end");
    return tree;
  }

  value(depth) {
    if (depth > DEPTH) this.fail("nested too deeply");
    if (this.take("{")) return this.object(depth);
    if (this.take("[")) return this.array(depth);
    if (this.take('"')) return this.string();
    if (this.take("true")) return true;
    if (this.take("false")) return false;
    if (this.take("null")) return null;
    return this.number();
  }

  object(depth) {
    const out = new Map();
    if (this.take("}")) return out;
    do {
      if (!this.take('"')) this.fail("a key is due");
      const key = this.string();
      if (!this.take(":")) this.fail("a colon is due");
      if (out.has(key)) this.fail("a key twice");
      out.set(key, this.value(depth + 1));
    } while (this.take(","));
    if (!this.take("}")) this.fail("no end of an object");
    return out;
  }

  array(depth) {
    const out = [];
    if (this.take("]")) return out;
    do out.push(this.value(depth + 1));
    while (this.take(","));
    if (!this.take("]")) this.fail("no end of an array");
    return out;
  }

  string() {
    let out = "";
    for (;;) {
      out += this.match(PLAIN)[0];
      const next = this.text[this.at++];
      if (next === '"') break;
      if (next !== "\\") this.fail("no end of a string");
      const code = this.text[this.at++];
      if (code === "u") {
        const digits = this.text.slice(this.at, this.at + 4);
        if (!/^[0-9a-fA-F]{4}$/.test(digits)) this.fail("a broken escape");
        out += String.fromCharCode(parseInt(digits, 16));
        this.at += 4;
      } else if (Object.hasOwn(ESCAPES, code)) out += ESCAPES[code];
      else this.fail("an unknown escape");
    }
    if (HALVES.test(out)) this.fail("half a character");
    return out;
  }

  number() {
    const found = this.match(NUMBER);
    if (!found) this.fail("a value is due");
    if (found[2] === undefined && found[3] === undefined) {
      if (found[0].length > 20) this.fail("an integer out of range");
      const integer = BigInt(found[0]);
      if (integer < -LIMIT || integer >= LIMIT) this.fail("an integer out of range");
      return integer;
    }
    const number = Number(found[0]);
    if (!Number.isFinite(number)) this.fail("a number out of range");
    return number;
  }
}

/** @param {Uint8Array} data */
export function parse(data, where) {
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data);
  } catch {
    refuse(`${where}: not UTF-8`);
  }
  return new Parser(text, where).whole();
}

/** JSON text that `parse` reads as the same tree. */
export function stringify(tree) {
  if (tree instanceof Map) return `{${[...tree].map(([key, item]) => `${JSON.stringify(key)}:${stringify(item)}`).join(",")}}`;
  if (Array.isArray(tree)) return `[${tree.map(stringify).join(",")}]`;
  if (typeof tree === "bigint") return String(tree);
  if (typeof tree !== "number") return JSON.stringify(tree);
  const text = Object.is(tree, -0) ? "-0" : String(tree);
  return /[.e]/.test(text) ? text : `${text}.0`;
}

// -- kinds: what JSON must look like --

export const text = (x) => typeof x === "string";
export const integer = (x) => typeof x === "bigint";
export const count = (x) => typeof x === "bigint" && x >= 0n && x < LIMIT;
export const anything = () => true;
export const nothing = (x) => x === null;
export const pattern = (expression) => (x) => typeof x === "string" && expression.test(x);
export const listOf = (kind) => (x) => Array.isArray(x) && x.every(kind);
export const mapOf = (kind) => (x) => x instanceof Map && [...x.values()].every(kind);
export const either = (...kinds) => (x) => kinds.some((kind) => kind(x));

/** An object with these members; those whose name ends in "?" may be absent, others are ignored. */
export const members = (kinds) => {
  const wanted = Object.entries(kinds).map(([name, kind]) => [name.replace("?", ""), name.endsWith("?"), kind]);
  return (x) => x instanceof Map && wanted.every(([name, optional, kind]) => (x.has(name) ? kind(x.get(name)) : optional));
};
