import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { fileURLToPath } from "node:url";
import { after, before, test } from "node:test";
import { HttpSource, UcfError, open, plain, toTypedArray } from "../src/index.js";
import { FileSource } from "../src/node.js";
import { hex } from "../src/xxh3.js";

const golden = (name) => fileURLToPath(new URL(`../../../conformance/${name}/`, import.meta.url));
const expected = async (name) => JSON.parse(await readFile(`${golden(name)}expected.json`, "utf8"));

test("xxh3 of every length class", () => {
  const data = Uint8Array.from({ length: 5000 }, (_, i) => (i * 7 + (i >> 8) * 13) & 255);
  const known = {
    0: "2d06800538d394c2", 1: "c44bdff4074eecdb", 3: "c3489259e968ad9e", 4: "d3d60c1519014e89", 8: "b88dee77f6bf6980", 9: "03688dcad730d826", 16: "9da23836adf2be1e", 17: "f34c3c9cf5a112d1", 128: "65f3c2c00fa93185", 129: "28065c6ec25f5b25",
    240: "4917a75c0ef8eed7", 241: "541b19226f0052e8", 1024: "cbeb9f3a1aeccda2", 1025: "d95859bed3193f4f", 5000: "80c417de53bda261",
  };
  for (const [n, digest] of Object.entries(known)) assert.equal(hex(data.subarray(0, Number(n))), digest, n);
});

let server, url, requests;

before(async () => {
  requests = [];
  server = createServer(async (request, response) => {
    const path = decodeURIComponent(request.url);
    const data = await readFile(golden(".") + path).catch(() => null);
    requests.push([path, request.headers.range]);
    if (data === null) return response.writeHead(404).end();
    const range = /^bytes=(\d+)-(\d+)$/.exec(request.headers.range ?? "");
    if (!range) return response.writeHead(200).end(data);
    const part = data.subarray(Number(range[1]), Number(range[2]) + 1);
    response.writeHead(206, { "Content-Range": `bytes ${range[1]}-${range[2]}/${data.length}` }).end(part);
  });
  await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
  url = `http://127.0.0.1:${server.address().port}/`;
});

after(() => server.close());

test("a slice over HTTP reads the record, the index and the blocks that it needs", async () => {
  const checkpoint = await open(`${url}boxes/checkpoint`);
  const opened = requests.map(([path]) => path.split("/").at(-1));
  assert.deepEqual(opened, ["ucf.json", "index.safetensors"]);
  const { slices } = await expected("boxes");
  for (const { tensor, offset, length, items } of slices) {
    assert.equal(Buffer.from((await checkpoint.read(tensor, { offset, length })).data).toString("hex"), items);
  }
  assert.ok(requests.slice(2).every(([, range]) => range), "shards are read by range");
});

test("what is not there is told from what is broken", async () => {
  await assert.rejects(open(`${url}nowhere`), (error) => error instanceof UcfError && error.kind === "not-a-checkpoint");
  const checkpoint = await open(new HttpSource(`${url}basic/checkpoint/`));
  await assert.rejects(checkpoint.read("model/x"), { kind: "missing" });
  await assert.rejects(checkpoint.read("model/w", { offset: [5, 0], length: [2, 8] }), RangeError);
  assert.deepEqual((await checkpoint.read("model/tied", { offset: [4, 0] })).shape, [2, 8]);
});

test("every dtype as numbers", async () => {
  const checkpoint = await open(new FileSource(`${golden("dtypes")}checkpoint`));
  const read = async (dtype, bytes) => toTypedArray({ dtype, data: Uint8Array.from(bytes) });
  assert.deepEqual([...(await read("BF16", [0x80, 0x3f, 0, 0xc0]))], [1, -2]);
  assert.deepEqual([...(await read("F16", [0, 0x3c, 1, 0, 0, 0xfc, 1, 0x7c]))], [1, 2 ** -24, -Infinity, NaN]);
  assert.deepEqual([...(await read("F8_E4M3", [0x38, 0x7e, 0x7f, 0x81]))], [1, 448, NaN, -(2 ** -9)]);
  assert.deepEqual([...(await read("F8_E5M2", [0x3c, 0x7c, 0x7d, 0x01]))], [1, Infinity, NaN, 2 ** -16]);
  assert.deepEqual([...(await read("F8_E4M3FNUZ", [0x40, 0x80, 0x7f]))], [1, NaN, 240]);
  assert.deepEqual([...(await read("F8_E5M2FNUZ", [0x40, 0x80, 0x7f]))], [1, NaN, 57344]);
  assert.deepEqual([...(await read("F8_E8M0", [127, 0, 255]))], [1, 2 ** -127, NaN]);
  for (const [name, { dtype, shape }] of checkpoint.tensors) {
    const items = await checkpoint.read(name);
    const perItem = dtype.startsWith("C") ? 2 : 1;
    assert.equal(toTypedArray(items).length, perItem * shape.reduce((a, b) => a * b, 1), name);
  }
});

test("values as plain JavaScript", async () => {
  const { values, step } = await open(new FileSource(`${golden("training")}checkpoint`));
  assert.equal(step, 100);
  assert.deepEqual(plain(values).scheduler, { last_epoch: 100, _last_lr: [0.001], base_lrs: [0.01] });
  assert.equal(values.get("scheduler").get("last_epoch"), 100n);
});
