// The model that is asked, of those the server has.

import { getJson } from "./api.js";
import { byId, element } from "./dom.js";

export class Models {
  constructor() {
    this.select = byId("model");
  }

  async load() {
    const { data } = await getJson("v1/models");
    const chosen = this.select.value;
    this.select.replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
    if (data.some(({ id }) => id === chosen)) this.select.value = chosen;
  }

  // Its name; a list that could not be loaded is asked for again.
  async chosen() {
    if (!this.select.value) await this.load();
    return this.select.value;
  }
}
