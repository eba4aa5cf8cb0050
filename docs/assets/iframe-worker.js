// The search runs in a worker, which browsers don't start for pages from a folder (file://). There its script runs in a hidden
// frame instead. mkdocs.yml names this file; its name is the one that Material's plugin "offline" looks for.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.started = new Promise(resolve => {
        this.frame.onload = () => {
          const inner = this.frame.contentWindow
          inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inner.document.createElement("script")
          script.src = address
          script.onload = () => resolve(inner)
          inner.document.body.appendChild(script)
        }
      })
      this.frame.srcdoc = "<!doctype html><body></body>"
      document.body.appendChild(this.frame)
    }
    postMessage(data) {
      this.started.then(inner => inner.dispatchEvent(new inner.MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}

// The search separates Chinese words where nothing else is beside them: "训练时OOM" becomes "训练时 OOM".
{
  const QUERY = 2
  const post = Worker.prototype.postMessage
  Worker.prototype.postMessage = function (message, ...more) {
    const apart = message.type === QUERY ? message.data.replace(/[\u4e00-\u9fff]+/g, " $& ") : message.data
    post.call(this, { ...message, data: apart }, ...more)
  }
}
