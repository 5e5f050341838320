// Browsers start no workers for pages that were opened as files. The search of the site is one, so
// an invisible frame of the same page takes its place there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      // What the worker posts arrives here as a message of the frame.
      this.inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      this.inside.importScripts = (...scripts) =>
        scripts.reduce((before, src) => before.then(() => this.load(src)), Promise.resolve())
      this.ready = this.load(url)
    }
    load(src) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script")
        script.src = String(src)
        script.onload = resolve
        script.onerror = reject
        this.inside.document.body.appendChild(script)
      })
    }
    postMessage(data) {
      this.ready.then(() => {
        this.inside.dispatchEvent(new MessageEvent("message", { data }))
      })
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
