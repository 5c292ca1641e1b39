//! The measurements of all rounds.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

/// The subject of a measurement, in the order in which the tables print it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) bench: String,
    pub(crate) dtype: String,
    pub(crate) world: usize,
    pub(crate) bytes: usize,
}

/// The measured system.
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

/// The statistic over the medians of several rounds.
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

#[derive(Debug, Default)]
pub(crate) struct Rounds(BTreeMap<(Key, System), Vec<f64>>);

impl Rounds {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut rounds = Self::default();
        for (line, text) in text.lines().enumerate() {
            let measurement = measurement(text);
            let (key, system, time) =
                measurement.map_err(|error| format!("line {}, {text}: {error}", line + 1))?;
            rounds.0.entry((key, system)).or_default().push(time);
        }
        Ok(rounds)
    }

    /// All keys that have a time.
    pub(crate) fn keys(&self) -> Vec<Key> {
        self.0.keys().map(|(key, _)| key.clone()).collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The time of `system` in µs.
    pub(crate) fn time(&self, key: &Key, system: System, statistic: Statistic) -> Option<f64> {
        self.0.get(&(key.clone(), system)).and_then(|times| statistic.of(times.clone()))
    }
}

fn measurement(line: &str) -> Result<(Key, System, f64), String> {
    let fields: Vec<&str> = line.split(',').collect();
    let [_, bench, dtype, bytes, world, system, median, _] = fields[..] else {
        return Err(format!("has {} fields, not 8", fields.len()));
    };
    let number = |text: &str| text.parse::<usize>().map_err(|_| format!("{text} is no number"));
    let key = Key { bench: bench.into(), dtype: dtype.into(), world: number(world)?, bytes: number(bytes)? };
    let median = median.parse().map_err(|_| format!("{median} is no time"))?;
    Ok((key, system.parse()?, median))
}
