// The controller's public API, with the token that the user gave. The token lives in this tab's session storage only.

const KEY = "slipstream-token";

export class ApiError extends Error {
  constructor(status, detail, body) {
    super(detail);
    this.status = status;
    this.body = body;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
  /** Whether it can travel in a header at all. */
  isFit: (value) => /^[\x21-\x7e]+$/.test(value),
};

/** Headers that carry the token, if there is one. */
export function authorization() {
  const value = token.get();
  return value ? { Authorization: `Bearer ${value}` } : {};
}

/** The address of a worker's part of the API. */
export function workerPath(id, ...parts) {
  return ["v1/workers", encodeURIComponent(id), ...parts].join("/");
}

/** Ask the API; returns `{status, body}`, throws ApiError with the server's own words. */
export async function call(method, path, body) {
  const headers = authorization();
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), cache: "no-store", credentials: "omit" });
  } catch {
    throw new ApiError(0, "The controller does not answer.", null);
  }
  const answer = await response.json().catch(() => null);
  if (!response.ok) throw new ApiError(response.status, answer?.detail ?? `Status ${response.status}`, answer);
  return { status: response.status, body: answer };
}
