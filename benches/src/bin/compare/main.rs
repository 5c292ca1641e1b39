//! Summary of the measurements of `compare.sh`: Markdown tables, `compare.csv` and a picture.
//!
//! Each line of the input is a round's number and a measurement: `round,bench,dtype,bytes,world,system,median,minimum`.
//! The result is the smallest median over all rounds; the tables have the median of the medians too.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn_ddp::{Error, Result};
use burn_ddp_benches::ranks::{exit_code, say};
use clap::Parser;
use rounds::{Key, Rounds, Statistic, System};

mod plot;
mod rounds;
mod table;

/// Sums up what compare.sh measured
#[derive(Parser)]
struct Args {
    /// Measurements of all rounds
    rounds: PathBuf,
    /// Where the smallest medians go
    #[arg(long)]
    csv: PathBuf,
    /// Where the picture goes
    #[arg(long)]
    svg: PathBuf,
}

fn run(args: &Args) -> Result<()> {
    let text = std::fs::read_to_string(&args.rounds)
        .map_err(|error| Error::io(format!("cannot read {}", args.rounds.display()), error))?;
    let rounds = Rounds::parse(&text).map_err(Error::config)?;
    write(&args.csv, &csv(&rounds))?;
    write(&args.svg, &plot::all_reduce(&rounds).map_err(Error::config)?)?;
    say(format_args!("{}", table::all(&rounds)))
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|error| Error::io(format!("cannot write {}", path.display()), error))
}

/// One line for each measured key; a column is empty if its system has no measurement.
fn csv(rounds: &Rounds) -> String {
    let columns = [System::Ours, System::Gloo, System::Mpi, System::Torch, System::Limit];
    let mut text = "bench,dtype,bytes,world,ours_us,gloo_us,mpi_us,torch_us,limit_us\n".to_string();
    // The two whole steps are in the tables; the CSV has their difference.
    let whole_step = |key: &&Key| ["step_off", "step_on"].contains(&key.bench.as_str());
    for key @ Key { bench, dtype, world, bytes } in rounds.keys().iter().filter(|key| !whole_step(key)) {
        text += &format!("{bench},{dtype},{bytes},{world}");
        for system in columns {
            let time = rounds.time(key, system, Statistic::Minimum);
            text += &time.map_or(",".into(), |time| format!(",{time:.3}"));
        }
        text.push('\n');
    }
    text
}

fn main() -> ExitCode {
    exit_code("compare", run(&Args::parse()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUNDS: &str = "\
1,all_reduce,f32,4096,2,ours,3.5,3.0
1,all_reduce,f32,4096,2,mpi,7,6
2,all_reduce,f32,4096,2,ours,2.5,2.0
1,step_on,f32,100,2,torch,60,50
1,step_added,f32,100,2,torch,20,-5
2,step_added,f32,100,2,torch,15,3
";

    #[test]
    fn the_smallest_medians_count() {
        let text = csv(&Rounds::parse(ROUNDS).unwrap());
        let lines: Vec<_> = text.lines().skip(1).collect();
        assert_eq!(lines, ["all_reduce,f32,4096,2,2.500,,7.000,,", "step_added,f32,100,2,,,,15.000,"]);
    }

    #[test]
    fn a_line_that_is_none_is_named() {
        let error = Rounds::parse("1,all_reduce,f32,many,2,ours,1,1\n").unwrap_err();
        assert!(error.contains("line 1") && error.contains("many"), "{error}");
    }
}
