// Snapshot directories (section 7 of the specification), read as one checkpoint.

import { UcfError, need } from "./json.js";
import { Checkpoint, SLOT, shardOf, unseal } from "./reader.js";
import { checkValue, merge } from "./values.js";

/** One version, from the records of its ranks. `verified` says whether all its slots have checksums. */
class Snapshot extends Checkpoint {
  static async of(source, slots) {
    const block = Number(slots[0].get("block_bytes"));
    need(slots.every((slot) => Number(slot.get("block_bytes")) === block), "slots of several block sizes");
    const made = new Snapshot(source, slots[0], slots.map((slot) => shardOf(slot, block, slot.get("file"))), block);
    await made.rebuild();
    made.record = new Map([["step", slots[0].get("step")], ["mesh", new Map(slots.flatMap((slot) => [...(slot.get("mesh") ?? [])]))]]);
    made.verified = made.shards.every((shard) => shard.tableDigest !== null);
    made.values = merge(slots.map((slot) => checkValue(slot.get("values"))));
    const united = new Map();
    for (const [alias, target] of slots.flatMap((slot) => [...(slot.get("aliases") ?? [])])) {
      need((united.get(alias) ?? target) === target, `ranks tie ${alias} to different tensors`, "conflict");
      united.set(alias, target);
    }
    made.aliases = new Map([...united].map(([alias, target]) => [alias, united.get(target) ?? target]));
    made.checkAliases();
    return made;
  }
}

/** Versions by step, world and run; records that must be ignored are. */
async function versions(source, folders) {
  const found = new Map();
  for (const folder of folders) {
    const names = await source.list(folder);
    for (const name of names) {
      const slot = /^slot-(0|[1-9][0-9]*)\.json$/.exec(name);
      const record = slot && (await recordOf(source, `${folder}/${name}`));
      if (!record || record.get("file") !== `slot-${slot[1]}.safetensors` || !names.includes(record.get("file"))) continue;
      const named = folder === `rank-${String(record.get("rank")).padStart(5, "0")}` && record.get("rank") < record.get("world");
      const path = `${folder}/${record.get("file")}`;
      if (!named || (await source.read(path, 0, 1))?.size !== Number(record.get("size"))) continue;
      const key = JSON.stringify([record.get("step"), record.get("world"), record.get("run") ?? ""].map(String));
      const version = found.get(key) ?? { step: record.get("step"), world: record.get("world"), ranks: new Map() };
      found.set(key, version);
      const before = version.ranks.get(record.get("rank"));
      if (!before || (before.get("created") ?? "") <= (record.get("created") ?? "")) version.ranks.set(record.get("rank"), new Map(record).set("file", path));
    }
  }
  return [...found.values()];
}

async function recordOf(source, path) {
  try {
    const record = await unseal(source, path, SLOT);
    shardOf(record, Number(record.get("block_bytes")), path);
    return record;
  } catch (error) {
    if (error instanceof UcfError) return null;
    throw error;
  }
}

/** The newest complete version that is not refused. */
export async function openSnapshot(source, folders) {
  const passedOver = [];
  const created = (version) => [...version.ranks.values()].map((record) => record.get("created") ?? "").sort().at(-1);
  const sorted = (await versions(source, folders)).sort(
    (a, b) => Number(b.step - a.step) || (created(a) < created(b) ? 1 : -1),
  );
  for (const { step, world, ranks } of sorted) {
    try {
      need(BigInt(ranks.size) === world, "incomplete");
      const slots = [...ranks.keys()].sort((a, b) => Number(a - b)).map((rank) => ranks.get(rank));
      const made = await Snapshot.of(source, slots);
      made.passedOver = passedOver;
      return made;
    } catch (error) {
      if (!(error instanceof UcfError)) throw error;
      passedOver.push(`step ${step}: ${error.message}`);
    }
  }
  throw new UcfError("not-a-checkpoint", `no complete version: ${passedOver.join("; ")}`);
}
