import type { Bytes, Source } from "./index.js";

/** Files below a directory of a local disk. */
export class FileSource implements Source {
  constructor(directory: string);
  read(path: string, start?: number, stop?: number): Promise<Bytes | null>;
  list(path: string): Promise<string[]>;
}
