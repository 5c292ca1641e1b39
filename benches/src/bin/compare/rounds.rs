//! The measurements of all rounds.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

/// What was measured; sorted as it is to be printed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) bench: String,
    pub(crate) dtype: String,
    pub(crate) world: usize,
    pub(crate) bytes: usize,
}

/// Whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum System {
    Ours,
    Gloo,
    Mpi,
    Torch,
    Limit,
}

impl FromStr for System {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "ours" => System::Ours,
            "gloo" => System::Gloo,
            "mpi" => System::Mpi,
            "torch" => System::Torch,
            "limit" => System::Limit,
            other => return Err(format!("{other} is no system")),
        })
    }
}

/// How the medians of several rounds become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Statistic {
    Minimum,
    Median,
}

impl Statistic {
    fn of(self, mut times: Vec<f64>) -> Option<f64> {
        times.sort_by(f64::total_cmp);
        match self {
            Statistic::Minimum => times.first().copied(),
            Statistic::Median => times.get(times.len() / 2).copied(),
        }
    }
}

/// What synchronization adds to a step: a difference of two benches, not one of its own.
const ADDED: &str = "step_added";
const STEP: [&str; 2] = ["step_off", "step_on"];

#[derive(Debug, Default)]
pub(crate) struct Rounds(BTreeMap<(Key, System), Vec<(usize, f64)>>);

impl Rounds {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut rounds = Self::default();
        for (line, text) in text.lines().enumerate() {
            let measurement = measurement(text);
            let (round, key, system, time) =
                measurement.map_err(|error| format!("line {}, {text}: {error}", line + 1))?;
            rounds.0.entry((key, system)).or_default().push((round, time));
        }
        Ok(rounds)
    }

    /// All that there is a time for.
    pub(crate) fn keys(&self) -> Vec<Key> {
        let added = |key: &Key| match STEP.contains(&key.bench.as_str()) {
            true => Key { bench: ADDED.into(), ..key.clone() },
            false => key.clone(),
        };
        self.0.keys().map(|(key, _)| added(key)).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The time of `system` in µs.
    pub(crate) fn time(&self, key: &Key, system: System, statistic: Statistic) -> Option<f64> {
        if key.bench != ADDED {
            let times = self.0.get(&(key.clone(), system))?;
            return statistic.of(times.iter().map(|(_, time)| *time).collect());
        }
        let of = |bench: &str| self.0.get(&(Key { bench: bench.into(), ..key.clone() }, system));
        let [off, on] = STEP.map(of);
        let (off, on) = (off?, on?);
        let fastest =
            |times: &[(usize, f64)]| Statistic::Minimum.of(times.iter().map(|(_, time)| *time).collect());
        match statistic {
            // The smallest difference would be that of the round in which something else slowed the steps without.
            Statistic::Minimum => Some(fastest(on)? - fastest(off)?),
            Statistic::Median => {
                let same = |round| off.iter().find(|(other, _)| *other == round);
                let added = on.iter().filter_map(|(round, on)| Some(on - same(*round)?.1));
                statistic.of(added.collect())
            }
        }
    }
}

fn measurement(line: &str) -> Result<(usize, Key, System, f64), String> {
    let fields: Vec<&str> = line.split(',').collect();
    let [round, bench, dtype, bytes, world, system, median, _] = fields[..] else {
        return Err(format!("has {} fields, not 8", fields.len()));
    };
    let number = |text: &str| text.parse::<usize>().map_err(|_| format!("{text} is no number"));
    let key = Key { bench: bench.into(), dtype: dtype.into(), world: number(world)?, bytes: number(bytes)? };
    let median = median.parse().map_err(|_| format!("{median} is no time"))?;
    Ok((number(round)?, key, system.parse()?, median))
}
