// A text the browser keeps; where it keeps nothing, the page does until it is closed.

export class Kept {
  constructor(storage, name) {
    Object.assign(this, { storage, name });
    this.value = "";
  }

  get() {
    try {
      return this.storage().getItem(this.name) ?? this.value;
    } catch {
      return this.value;
    }
  }

  set(value) {
    this.value = value;
    try {
      if (value) this.storage().setItem(this.name, value);
      else this.storage().removeItem(this.name);
    } catch {
      // a browser that blocks storage
    }
  }
}
