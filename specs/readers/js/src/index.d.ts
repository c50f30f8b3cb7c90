/** Bytes of a file and, where known, the size of all of it. */
export interface Bytes {
  data: Uint8Array;
  size?: number;
}

/** Where bytes come from. Paths are relative to a checkpoint's (or run's) directory. */
export interface Source {
  /** Bytes [start, stop) of a file, or all of it; null when it is not there. */
  read(path: string, start?: number, stop?: number): Promise<Bytes | null>;
  /** Names in a folder ("" is the top), none when it is not there. Without it, only checkpoints can be opened, no runs. */
  list?(path: string): Promise<string[]>;
}

export type Dtype =
  | "BOOL" | "U8" | "I8" | "U16" | "I16" | "U32" | "I32" | "U64" | "I64"
  | "F16" | "BF16" | "F32" | "F64" | "C32" | "C64" | "C128"
  | "F8_E4M3" | "F8_E5M2" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" | "F8_E8M0" | "F4" | "F6_E2M3" | "F6_E3M2";

export type ErrorKind =
  | "not-a-checkpoint" | "missing" | "version" | "checksum" | "format" | "coverage" | "overlap" | "conflict";

/** What the specification says a reader must refuse. Other errors (network, disk) pass through as they are. */
export class UcfError extends Error {
  kind: ErrorKind;
}

/** JSON of the value tree, exactly: integers are bigint, other numbers number, objects Map. `plain` makes it easier. */
export type Value = null | boolean | string | bigint | number | Value[] | Map<string, Value>;

export interface Box {
  /** First index per dimension; zeros by default. */
  offset?: number[];
  /** Items per dimension; all that follow `offset` by default. */
  length?: number[];
}

export interface Items {
  dtype: Dtype;
  shape: number[];
  /** Items in row-major order, little-endian. */
  data: Uint8Array;
}

export class Checkpoint {
  private constructor();
  /** Shapes count items: one of F4 is a byte that holds two numbers. */
  readonly tensors: Map<string, { readonly dtype: Dtype; readonly shape: readonly number[] }>;
  /** alias → name of the tensor that it is (tied weights). */
  readonly aliases: Map<string, string>;
  /** Everything that is no tensor. */
  readonly values: Value;
  readonly step: number | null;
  readonly mesh: Record<string, number>;
  /** False for a snapshot of which some slot has no checksums: its bytes can't be verified. */
  readonly verified: boolean;
  /** Newer versions of a snapshot directory that could not be opened, and why. */
  readonly passedOver: readonly string[];
  /**
   * A box of a tensor or alias. Reads the blocks that it needs, and verifies each.
   * @throws UcfError `missing` for an unknown name, `coverage`, `overlap`, `checksum`, `format`
   * @throws RangeError for a box outside of the tensor
   */
  read(name: string, box?: Box): Promise<Items>;
  /** Files that travel along, verified: path beside the model → bytes. */
  companions(): Promise<Map<string, Uint8Array>>;
}

/** Files below a URL, by HTTP ranges. */
export class HttpSource implements Source {
  constructor(url: string, init?: RequestInit);
  read(path: string, start?: number, stop?: number): Promise<Bytes | null>;
}

/**
 * Opens a checkpoint; from a source that can list, also the newest one of a run or snapshot directory.
 * Reads the commit record and the index, no tensor.
 * @param where a source, or the URL of a checkpoint's directory
 * @param options `rebuild`: use what the shards say of themselves, as if the index were lost
 */
export function open(where: Source | string, options?: { rebuild?: boolean }): Promise<Checkpoint>;

/** Numbers: F16, BF16 and F8_* become Float32Array, exactly; complex ones are pairs; packed ones (F4, F6_*) stay bytes. */
export function toTypedArray(items: Items): ArrayBufferView;

/** A value tree with objects for Maps, and numbers for integers that are safe. */
export function plain(value: Value): unknown;
