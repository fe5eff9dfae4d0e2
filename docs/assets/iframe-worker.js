// A browser starts no web worker for a page that is opened from a disk (file:). There a hidden frame runs the worker's
// script instead, so that the search works without a server and without a network.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.onmessage = this.onerror = this.onmessageerror = null
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      this.inside = this.frame.contentWindow
      // In a worker, postMessage speaks to the page. The answer comes later, as from a worker.
      this.inside.postMessage = (data) => setTimeout(() => this.onmessage?.(new MessageEvent("message", { data })))
      const script = this.inside.document.createElement("script")
      script.src = url
      script.onerror = (event) => this.onerror?.(event)
      this.loaded = new Promise((resolve) => (script.onload = resolve))
      this.inside.document.head.append(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
