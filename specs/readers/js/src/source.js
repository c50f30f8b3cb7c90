// Where bytes come from. A source reads ranges of files by their path; `null` means that a file is not there.

/** Files below a URL, by HTTP ranges. It can't list them, so it opens checkpoints, not run directories. */
export class HttpSource {
  /**
   * @param {string} url of the directory
   * @param {RequestInit} [init] passed on with every request: headers, credentials, signal
   */
  constructor(url, init = {}) {
    this.url = url.endsWith("/") ? url : `${url}/`;
    this.init = init;
  }

  async read(path, start, stop) {
    const headers = new Headers(this.init.headers);
    if (stop !== undefined) {
      if (start === stop) return { data: new Uint8Array(0) };
      headers.set("Range", `bytes=${start}-${stop - 1}`);
    }
    const response = await fetch(this.url + path.split("/").map(encodeURIComponent).join("/"), { ...this.init, headers });
    if (response.status === 404 || response.status === 410) return null;
    if (response.status === 416) return { data: new Uint8Array(0), size: total(response) };
    if (!response.ok) throw new Error(`${response.url}: HTTP status ${response.status}`);
    const data = new Uint8Array(await response.arrayBuffer());
    if (response.status === 206) return { data, size: total(response) };
    return { data: stop === undefined ? data : data.subarray(start, stop), size: data.length };
  }
}

function total(response) {
  const found = /\/(\d+)$/.exec(response.headers.get("Content-Range") ?? "");
  return found ? Number(found[1]) : undefined; // browsers hide it unless the server exposes it
}

/** A folder of a source. */
export function within(source, folder) {
  return {
    read: (path, start, stop) => source.read(`${folder}/${path}`, start, stop),
    list: (path) => source.list(path ? `${folder}/${path}` : folder),
  };
}
