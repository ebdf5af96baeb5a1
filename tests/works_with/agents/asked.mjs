// What every agent here is asked, in two turns, and its two tools.
export const QUESTIONS = ["What is the weather in Oslo, and how many people live there?", "And in Rome?"];
export const INSTRUCTIONS = "Answer with the help of your tools.";
export const weather = ({ city }) => ({ Oslo: "sunny", Rome: "rainy" })[city];
export const population = ({ city }) => ({ Oslo: "700,000", Rome: "2,800,000" })[city];
