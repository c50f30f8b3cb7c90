// The public interface: see README.md.

import { UcfError } from "./json.js";
import { Checkpoint, newestStep } from "./reader.js";
import { openSnapshot } from "./snapshot.js";
import { HttpSource, within } from "./source.js";
import { plain } from "./values.js";
import { toTypedArray } from "./typed.js";

export { Checkpoint, HttpSource, UcfError, plain, toTypedArray };

/**
 * Opens a checkpoint; from a source that can list its files, also the newest one of a run or snapshot directory.
 * @param {import("./index.d.ts").Source | string} where a source, or the URL of a checkpoint's directory
 */
export async function open(where, options = {}) {
  const source = typeof where === "string" ? new HttpSource(where) : where;
  const names = source.list ? await source.list("") : ["ucf.json"];
  if (names.includes("ucf.json")) {
    try {
      return await Checkpoint.open(source, options);
    } catch (error) {
      const absent = error instanceof UcfError && error.kind === "missing" && error.message.includes("ucf.json is missing");
      throw absent ? new UcfError("not-a-checkpoint", "no ucf.json") : error;
    }
  }
  const ranks = names.filter((name) => /^rank-[0-9]{5,}$/.test(name)).sort();
  if (ranks.length) return openSnapshot(source, ranks);
  return Checkpoint.open(within(source, await newestStep(source, names)), options);
}
