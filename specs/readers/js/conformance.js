// Answers the requests of the conformance kit (specs/conformance/README.md): `node specs/readers/js/conformance.js`.

import { createInterface } from "node:readline";
import { UcfError, open } from "./src/index.js";
import { stringify } from "./src/json.js";
import { FileSource } from "./src/node.js";

const toHex = (data) => Buffer.from(data.buffer, data.byteOffset, data.byteLength).toString("hex");
const mapValues = (map, change) => new Map([...map].map(([key, item]) => [key, change(item)]));

async function answer(request) {
  const opened = await open(new FileSource(request.path), { rebuild: request.do === "rebuild" });
  if (request.do === "slice") {
    const { data } = await opened.read(request.tensor, { offset: request.offset, length: request.length });
    return new Map([["items", toHex(data)]]);
  }
  const tensors = new Map();
  for (const name of opened.tensors.keys()) {
    const { dtype, shape, data } = await opened.read(name);
    tensors.set(name, new Map([["dtype", dtype], ["shape", shape.map(BigInt)], ["items", toHex(data)]]));
  }
  return new Map([
    ["tensors", tensors],
    ["aliases", opened.aliases],
    ["values", opened.values],
    ["step", opened.step === null ? null : BigInt(opened.step)],
    ["mesh", mapValues(new Map(Object.entries(opened.mesh)), BigInt)],
    ["companions", mapValues(await opened.companions(), toHex)],
    ["verified", opened.verified],
  ]);
}

for await (const line of createInterface({ input: process.stdin })) {
  try {
    console.log(stringify(await answer(JSON.parse(line))));
  } catch (error) {
    if (!(error instanceof UcfError)) throw error;
    console.log(JSON.stringify({ error: error.kind, message: error.message }));
  }
}
