// Files of a local disk, for Node.

import { open as openFile, readdir } from "node:fs/promises";
import { join } from "node:path";

/** Files below a directory. */
export class FileSource {
  constructor(directory) {
    this.directory = directory;
  }

  async read(path, start = 0, stop = undefined) {
    let file;
    try {
      file = await openFile(join(this.directory, path), "r");
    } catch (error) {
      if (error.code === "ENOENT" || error.code === "ENOTDIR") return null;
      throw error;
    }
    try {
      const { size } = await file.stat();
      const data = new Uint8Array(Math.max(0, Math.min(stop ?? size, size) - start));
      for (let at = 0; at < data.length; ) {
        const { bytesRead } = await file.read(data, at, data.length - at, start + at);
        if (bytesRead === 0) return { data: data.subarray(0, at), size };
        at += bytesRead;
      }
      return { data, size };
    } finally {
      await file.close();
    }
  }

  async list(path) {
    try {
      return await readdir(join(this.directory, path));
    } catch (error) {
      if (error.code === "ENOENT" || error.code === "ENOTDIR") return [];
      throw error;
    }
  }
}
