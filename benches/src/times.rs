//! Times of equal iterations.

use std::time::Duration;

/// The times of equal iterations, in µs and sorted.
#[derive(Clone, Debug)]
pub struct Times(Vec<f64>);

impl Times {
    /// The times of `durations`, of which there is at least one.
    pub fn new(durations: impl IntoIterator<Item = Duration>) -> Self {
        let mut times: Vec<f64> = durations.into_iter().map(|time| time.as_secs_f64() * 1e6).collect();
        assert!(!times.is_empty(), "no iteration was timed");
        times.sort_by(f64::total_cmp);
        Self(times)
    }

    /// The difference of each of `longer` to its counterpart in `shorter`, which may be negative.
    pub fn of_differences(longer: &[Duration], shorter: &[Duration]) -> Self {
        assert!(!longer.is_empty() && longer.len() == shorter.len(), "no pairs were timed");
        let difference =
            |(longer, shorter): (&Duration, &Duration)| (longer.as_secs_f64() - shorter.as_secs_f64()) * 1e6;
        let mut times: Vec<f64> = longer.iter().zip(shorter).map(difference).collect();
        times.sort_by(f64::total_cmp);
        Self(times)
    }

    /// The shortest time in µs.
    pub fn minimum(&self) -> f64 {
        self.0[0]
    }

    /// The median in µs; of an even number of times the upper one of the two in the middle.
    pub fn median(&self) -> f64 {
        self.0[self.0.len() / 2]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_does_not_matter() {
        let times = Times::new([30, 10, 20].map(Duration::from_micros));
        assert_eq!((times.minimum(), times.median()), (10.0, 20.0));
        let [slow, fast] = [[30, 10, 50], [10, 20, 40]].map(|times| times.map(Duration::from_micros));
        let added = Times::of_differences(&slow, &fast);
        assert_eq!([added.minimum(), added.median()].map(f64::round), [-10.0, 10.0]);
    }
}
