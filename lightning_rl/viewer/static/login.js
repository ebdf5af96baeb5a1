// Gives the admin key for a session. The key is in no URL, and is kept nowhere.

const form = document.getElementById("login");
const field = document.getElementById("key");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const answer = await fetch("/login", {
    method: "POST",
    headers: { "content-type": "application/json", "x-lightning-rl": "viewer" },
    body: JSON.stringify({ key: field.value }),
  });
  field.value = "";
  if (answer.ok) location.assign("/");
  else document.getElementById("problem").textContent = (await answer.json()).error;
});
