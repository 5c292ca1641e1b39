//! Markdown tables, for a terminal and for `docs/benchmarks.md`.

use burn_ddp_benches::sizes;

use crate::rounds::{Key, Rounds, Statistic, System};

pub(crate) fn all(rounds: &Rounds) -> String {
    let mut text = String::new();
    for (statistic, title) in [
        (Statistic::Minimum, "Smallest median of all rounds"),
        (Statistic::Median, "Median of all rounds' medians"),
    ] {
        text += &format!("\n{title}, µs:\n\n");
        text += &one(rounds, statistic);
    }
    text += &differences(rounds);
    text
}

fn one(rounds: &Rounds, statistic: Statistic) -> String {
    let mut text =
        "| bench | dtype | bytes | world | ours | Gloo | Open MPI | PyTorch DDP | bound ".to_string();
    text += "| ours / bound | MPI / ours | Gloo / ours | ours / PyTorch |\n";
    text += "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
    for key in &rounds.keys() {
        let time = |system| rounds.time(key, system, statistic);
        let all = [System::Ours, System::Gloo, System::Mpi, System::Torch, System::Limit].map(time);
        let [ours, gloo, mpi, torch, limit] = all;
        let ratio = |over: Option<f64>, under: Option<f64>| Some(over? / under?);
        let ratios = [ratio(ours, limit), ratio(mpi, ours), ratio(gloo, ours), ratio(ours, torch)];
        let times = all.iter().map(|time| time.map_or(String::new(), |time| format!("{time:.1}")));
        let ratios = ratios.iter().map(|ratio| ratio.map_or(String::new(), |ratio| format!("{ratio:.2}")));
        let cells: Vec<String> = times.chain(ratios).collect();
        let Key { bench, dtype, world, bytes } = key;
        text +=
            &format!("| {bench} | {dtype} | {} | {world} | {} |\n", sizes::show(*bytes), cells.join(" | "));
    }
    text
}

/// The time that a group adds to the collective, and bf16 against f32 for equally many elements.
fn differences(rounds: &Rounds) -> String {
    let ours = |key: &Key| rounds.time(key, System::Ours, Statistic::Minimum);
    let mut text = String::new();
    for key in rounds.keys() {
        let Some(time) = ours(&key) else { continue };
        let (other, what) = match (key.bench.as_str(), key.dtype.as_str()) {
            ("all_reduce_group", _) => (Key { bench: "all_reduce".into(), ..key.clone() }, "through a group"),
            ("all_reduce", "bf16") => {
                (Key { dtype: "f32".into(), bytes: 2 * key.bytes, ..key.clone() }, "bf16")
            }
            _ => continue,
        };
        let Some(reference) = ours(&other) else { continue };
        let size = sizes::show(other.bytes);
        text += &match what {
            "bf16" => format!("- bf16 against f32 of {size}: {:.2} times\n", time / reference),
            _ => format!("- {what}, {size}, {} processes: {:.1} µs more\n", key.world, time - reference),
        };
    }
    if text.is_empty() { text } else { format!("\nOf the smallest medians:\n\n{text}") }
}
