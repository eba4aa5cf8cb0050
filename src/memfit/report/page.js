(() => {
  "use strict";
  const GRID = 10000;
  const told = JSON.parse(document.getElementById("hover").textContent);
  const make = (tag, look, parent, text = "") => {
    const element = document.createElement(tag);
    element.className = look;
    element.textContent = text;
    parent.append(element);
    return element;
  };
  const tip = make("div", "tip", document.body);
  let shownBy = null;
  tip.hidden = true;

  function bytes(count) {
    if (count < 1024) return `${Math.round(count)} B`;
    for (const unit of ["KiB", "MiB", "GiB"]) if ((count /= 1024) < 1024) return `${count.toFixed(1)} ${unit}`;
    return `${(count / 1024).toFixed(2)} TiB`;
  }

  function ticks(low, high) {
    const least = (high - low) / 5, power = 10 ** Math.floor(Math.log10(least));
    const step = power * [1, 2, 5, 10].find((n) => power * n >= least * (1 - 1e-9));
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    const format = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n <= high / step + 1e-9; n++)
      found.push([n * step, (n ? n * step : 0).toLocaleString("en", format)]);
    return found;
  }

  const summed = (changes) => {
    let sum = 0;
    return changes.map((change) => (sum += change));
  };

  // Shows lines of text near a point of the window, the first one bold; hides them without any.
  function show(lines, x, y) {
    tip.replaceChildren();
    lines.forEach((line, i) => make(i ? "div" : "b", "", tip, line));
    tip.hidden = !lines.length;
    const left = x + 14 + tip.offsetWidth > innerWidth ? x - 14 - tip.offsetWidth : x + 14;
    tip.style.left = `${Math.max(4, Math.min(left, innerWidth - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - tip.offsetHeight - 4))}px`;
  }

  class Plot {
    constructor(element) {
      this.box = element.querySelector(".box");
      this.svg = element.querySelector(".shapes");
      this.strip = element.querySelector(".strip");
      this.heads = [...element.querySelectorAll(".heads span")];
      this.ranges = [this.box.dataset.x, this.box.dataset.y].map((text) => text.split(" ").map(Number));
      this.fixed = [...this.heads, ...this.box.querySelectorAll(".note, .mark")].map((el) => [
        el, 100 * parseFloat(el.style.left), 100 * parseFloat(el.style.bottom || "0"),
      ]);
      this.read(told[element.id]);
      this.whole = [0, GRID, 0, GRID];
      this.view = this.whole;
      this.cross = make("i", "cross", this.box);
      this.drawn = make("i", "drawn", this.box);
      this.cross.hidden = this.drawn.hidden = true;
      this.buttons(element);
      this.listen();
    }

    read(hover) {
      this.hover = hover;
      if (!hover) return;
      hover.x = summed(hover.x);
      const [low, high] = this.ranges[0];
      this.at = hover.x.map((x) => (GRID * (x - low)) / (high - low));
      if (hover.held) hover.held = hover.held.map(([name, changes]) => [name, summed(changes)]);
    }

    buttons(element) {
      const row = make("span", "zoom", element.closest("figure").querySelector("figcaption"));
      const button = (text, label, act) => {
        const made = make("button", "", row, text);
        made.type = "button";
        made.setAttribute("aria-label", `${label}: ${element.closest("figure").querySelector("h3").textContent}`);
        made.addEventListener("click", act);
        return made;
      };
      button("+", "Zoom in", () => this.zoom(0.5));
      button("−", "Zoom out", () => this.zoom(2));
      this.reset = button("whole", "Show the whole", () => this.look(this.whole));
      this.reset.disabled = true;
    }

    // Halves or doubles the part shown, about what was pointed at last.
    zoom(factor) {
      const [x0, x1] = this.view, size = Math.min(GRID, Math.max(GRID / 2000, factor * (x1 - x0)));
      const middle = this.last >= x0 && this.last <= x1 ? this.last : (x0 + x1) / 2;
      const left = Math.max(0, Math.min(GRID - size, middle - size / 2));
      this.look(size === GRID ? this.whole : [left, left + size, ...this.heights(left, left + size)]);
    }

    // The heights to show of a part: a curve's own there, else all.
    heights(x0, x1) {
      if (!this.hover?.y) return this.view.slice(2);
      const [low, high] = this.ranges[1];
      const seen = this.hover.y.filter((y, i) => y !== null && this.at[i] >= x0 && this.at[i] <= x1);
      if (!seen.length) return [0, GRID];
      const [least, most] = [Math.min(...seen), Math.max(...seen)].map((y) => (GRID * (y - low)) / (high - low));
      const room = Math.max(0.06 * (most - least), 1);
      return [Math.max(0, least - room), Math.min(GRID, most + room)];
    }

    look(view) {
      this.view = view;
      const [x0, x1, y0, y1] = view;
      this.svg.setAttribute("viewBox", `${x0} ${GRID - y1} ${x1 - x0} ${y1 - y0}`);
      this.strip?.setAttribute("viewBox", `${x0} -1 ${x1 - x0} 2`);
      for (const [el, x, y] of this.fixed) {
        const left = (x - x0) / (x1 - x0), up = this.heads.includes(el) ? 0 : (y - y0) / (y1 - y0);
        const stays = el.matches(".budget"); // at the edge that it is beyond
        el.style.left = `${100 * (stays ? Math.max(0, Math.min(1, left)) : left)}%`;
        el.style.bottom = `${100 * (stays ? Math.max(0, Math.min(1, up)) : up)}%`;
        el.hidden = !stays && (left < 0 || left > 1 || up < 0 || up > 1);
      }
      this.box.querySelectorAll(".tx, .ty").forEach((el) => el.remove());
      const lines = [];
      [["tx", "left", x0, x1, this.ranges[0]], ["ty", "bottom", y0, y1, this.ranges[1]]].forEach(
        ([look, side, from, to, [low, high]]) => {
          const value = (at) => low + ((high - low) * at) / GRID;
          for (const [tick, text] of ticks(value(from), value(to))) {
            const at = (GRID * (tick - low)) / (high - low);
            make("span", look, this.box, text).style[side] = `${(100 * (at - from)) / (to - from)}%`;
            if (side === "bottom") lines.push(`M0 ${GRID - at}h${GRID}`);
          }
        }
      );
      this.svg.querySelector(".grid").setAttribute("d", lines.join(""));
      this.reset.disabled = view === this.whole;
    }

    // Where a pointer is, as parts of the box from its lower left corner.
    spot(event) {
      const box = this.svg.getBoundingClientRect();
      return [(event.clientX - box.left) / box.width, (box.bottom - event.clientY) / box.height];
    }

    tell(event) {
      const [left] = this.spot(event), [x0, x1] = this.view;
      this.last = x0 + left * (x1 - x0);
      const near = this.near(event);
      shownBy = this;
      if (near) return show(near, event.clientX, event.clientY);
      if (!this.at?.length || left < 0 || left > 1) return this.hush();
      const index = this.index();
      this.cross.hidden = false;
      this.cross.style.left = `${(100 * (this.at[index] - x0)) / (x1 - x0)}%`;
      show(this.lines(index), event.clientX, event.clientY);
    }

    // What the nearest mark within reach says.
    near(event) {
      let best = 22, said = null;
      for (const [mark] of this.fixed) {
        if (!mark.dataset.tip || mark.hidden) continue;
        const at = mark.getBoundingClientRect();
        const away = Math.hypot(at.left - event.clientX, at.top - event.clientY);
        if (away < best) [best, said] = [away, mark.dataset.tip];
      }
      return said?.split("\n");
    }

    // The point that is pointed at: the nearest of a curve, the one that has begun of a timeline.
    index() {
      const { at } = this;
      let low = 0, high = at.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (at[middle] <= this.last) low = middle;
        else high = middle - 1;
      }
      const nearer = this.hover.y && low + 1 < at.length && at[low + 1] - this.last < this.last - at[low];
      return nearer ? low + 1 : low;
    }

    lines(index) {
      const { hover } = this;
      if (hover.kind === "curve") {
        const value = hover.y[index] === null ? "not finite" : `${hover.y[index]} ${hover.unit}`;
        return [value, `step ${hover.x[index].toLocaleString("en")}`];
      }
      const held = hover.held.map(([name, all]) => [all[index] * hover.size, name]).sort((a, b) => b[0] - a[0]);
      const total = held.reduce((sum, [count]) => sum + count, 0);
      const parts = held.filter(([count]) => count && count >= total / 100);
      const said = hover.said[index].map((word) => hover.words[word]);
      return [bytes(total), ...said, ...parts.map(([count, name]) => `${bytes(count)}  ${name}`)];
    }

    hush() {
      this.cross.hidden = true;
      if (shownBy === this) show([], 0, 0);
    }

    listen() {
      this.box.addEventListener("pointermove", (event) => (this.from ? this.draw(event) : this.tell(event)));
      this.box.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.hush());
      addEventListener("pointerdown", (event) => this.box.contains(event.target) || this.hush());
      this.box.addEventListener("dblclick", () => this.look(this.whole));
      this.box.addEventListener("pointerdown", (event) => {
        if (event.pointerType !== "mouse") return this.tell(event);
        if (event.button) return;
        event.preventDefault();
        this.box.setPointerCapture(event.pointerId);
        this.from = this.spot(event);
      });
      this.box.addEventListener("pointerup", (event) => this.from && this.drop(event));
      this.box.addEventListener("pointercancel", () => ((this.from = null), (this.drawn.hidden = true)));
    }

    // The rectangle from where the button was pressed; the whole height, unless it is drawn high.
    area(event) {
      const clip = (part) => Math.max(0, Math.min(1, part));
      const [x, y] = this.spot(event).map(clip), [fromX, fromY] = this.from.map(clip);
      const high = Math.abs(y - fromY) > 0.15;
      return [Math.min(x, fromX), Math.max(x, fromX), high ? Math.min(y, fromY) : 0, high ? Math.max(y, fromY) : 1, high];
    }

    draw(event) {
      const [x0, x1, y0, y1] = this.area(event);
      this.hush();
      this.drawn.hidden = false;
      Object.assign(this.drawn.style, {
        left: `${100 * x0}%`, width: `${100 * (x1 - x0)}%`, bottom: `${100 * y0}%`, height: `${100 * (y1 - y0)}%`,
      });
    }

    drop(event) {
      const [x0, x1, y0, y1, high] = this.area(event), [left, right, low, top] = this.view;
      this.from = null;
      this.drawn.hidden = true;
      if ((x1 - x0) * (right - left) < 3 || x1 - x0 < 0.01) return;
      const from = left + x0 * (right - left), to = left + x1 * (right - left);
      this.look([from, to, ...(high ? [low + y0 * (top - low), low + y1 * (top - low)] : this.heights(from, to))]);
    }
  }

  for (const mark of document.querySelectorAll(".mark[title]")) {
    mark.dataset.tip = mark.title;
    mark.removeAttribute("title");
  }
  for (const element of document.querySelectorAll(".plot")) new Plot(element);
  addEventListener("scroll", () => (tip.hidden = true), { passive: true });

  const SIZES = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, "µs": 1e-6, ms: 1e-3, s: 1, min: 60 };

  // The number that a cell's text says ("760.0 MiB"); less than all where it says none.
  function figure(text) {
    const [number, unit] = text.replaceAll(",", "").split(" ");
    return Number.isFinite(parseFloat(number)) ? parseFloat(number) * (SIZES[unit] ?? 1) : -Infinity;
  }

  function sorted(table, column, ascending, numeric) {
    const body = table.tBodies[0];
    const text = (row) => row.cells[column].textContent.trim();
    const compare = numeric
      ? (a, b) => figure(text(a)) - figure(text(b)) || 0
      : (a, b) => text(a).localeCompare(text(b), undefined, { numeric: true });
    body.append(...[...body.rows].sort((a, b) => (ascending ? compare(a, b) : compare(b, a))));
  }

  for (const table of document.querySelectorAll("table.sortable"))
    [...table.tHead.rows[0].cells].forEach((header, column) =>
      header.querySelector("button").addEventListener("click", () => {
        const was = header.getAttribute("aria-sort");
        const ascending = was ? was === "descending" : !header.classList.contains("number");
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        sorted(table, column, ascending, header.classList.contains("number"));
      })
    );

  for (const code of document.querySelectorAll("pre.command")) {
    const button = make("button", "copy", code.parentElement, "copy");
    button.type = "button";
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(code);
      }
    });
  }
})();
