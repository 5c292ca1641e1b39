//! The forecast of the next micro-step: whether it is the window's last, and its weight.
//!
//! A gradient can be sent during a backward pass only if that pass is the window's last, and only multiplied by its
//! weight, so both must be known before the pass. Where they are not, all gradients wait for
//! [`Reducer::reduce`](super::Reducer::reduce).

use super::GradientReduction;

/// The known weight of the micro-step whose backward pass comes next; `None` if micro-steps have no weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ExpectedWeight(pub(super) Option<f64>);

/// Facts that the caller gave, and facts learned from earlier windows and micro-steps.
#[derive(Debug)]
pub(super) struct Forecast {
    /// Micro-steps of a window, where the caller gave the number.
    given_length: Option<usize>,
    /// Micro-steps of the longest window so far. A window that ends early, as at the end of an epoch, changes nothing.
    longest: Option<usize>,
    /// True if micro-steps have weights.
    weighted: Option<bool>,
    /// Micro-steps of this window so far, those without items too.
    micro_steps: usize,
    /// Given by the caller: whether the next micro-step is the window's last.
    last: Option<bool>,
    /// Given by the caller: the weight of the next micro-step.
    weight: Option<f64>,
}

impl Forecast {
    pub(super) fn new(given_length: Option<usize>) -> Self {
        Self { given_length, longest: None, weighted: None, micro_steps: 0, last: None, weight: None }
    }

    #[cfg(feature = "train")]
    pub(super) fn expect_last(&mut self, last: bool) {
        self.last = Some(last);
    }

    pub(super) fn expect_weight(&mut self, weight: f64) {
        self.weight = Some(weight);
    }

    /// True if the next micro-step is expected to be the window's last.
    fn is_last(&self) -> bool {
        let length = self.given_length.or(self.longest);
        self.last.unwrap_or_else(|| length.is_some_and(|length| self.micro_steps + 1 == length))
    }

    /// The weight of the next micro-step, if that is the window's last and its weight is known.
    pub(super) fn next_if_last(&self, reduction: GradientReduction) -> Option<ExpectedWeight> {
        match (self.weight, self.weighted, reduction) {
            _ if !self.is_last() => None,
            (Some(weight), ..) => (weight > 0.0).then_some(ExpectedWeight(Some(weight))),
            (None, Some(false), _) | (None, _, GradientReduction::Sum) => Some(ExpectedWeight(None)),
            (None, ..) => None,
        }
    }

    /// The position of the next micro-step in its window, from 1.
    pub(super) fn next_number(&self) -> usize {
        self.micro_steps + 1
    }

    pub(super) fn micro_step_added(&mut self, weight: Option<f64>) {
        if weight != Some(0.0) {
            self.weighted = Some(self.weighted == Some(true) || weight.is_some());
        }
        self.micro_steps += 1;
        (self.last, self.weight) = (None, None);
    }

    pub(super) fn window_reduced(&mut self) {
        self.longest = self.longest.max(Some(self.micro_steps));
        self.window_discarded();
    }

    pub(super) fn window_discarded(&mut self) {
        self.micro_steps = 0;
        (self.last, self.weight) = (None, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEAN: GradientReduction = GradientReduction::Mean;

    fn window(forecast: &mut Forecast, weights: &[Option<f64>]) -> Vec<bool> {
        let step = |weight: &Option<f64>| {
            let known = forecast.next_if_last(MEAN).is_some();
            forecast.micro_step_added(*weight);
            known
        };
        let known = weights.iter().map(step).collect();
        forecast.window_reduced();
        known
    }

    #[test]
    fn a_length_that_was_told_holds_from_the_first_window() {
        let mut forecast = Forecast::new(Some(3));
        assert_eq!(window(&mut forecast, &[None; 3]), [false, false, true]);
        assert_eq!(window(&mut forecast, &[None; 2]), [false, false]);
        assert_eq!(window(&mut forecast, &[None; 3]), [false, false, true]);
    }

    #[test]
    fn the_longest_window_is_learned_and_a_short_one_is_not() {
        let mut forecast = Forecast::new(None);
        assert_eq!(window(&mut forecast, &[None; 3]), [false; 3]);
        assert_eq!(window(&mut forecast, &[None; 2]), [false; 2]);
        assert_eq!(window(&mut forecast, &[None; 3]), [false, false, true]);
    }

    #[test]
    fn weights_are_asked_for_once_one_was_seen() {
        let mut forecast = Forecast::new(Some(1));
        // Nothing is known of weights before the first micro-step.
        assert_eq!(window(&mut forecast, &[None]), [false]);
        assert_eq!(window(&mut forecast, &[Some(2.0)]), [true]);
        assert_eq!(window(&mut forecast, &[None]), [false]);
        assert_eq!(forecast.next_if_last(GradientReduction::Sum), Some(ExpectedWeight(None)));
        forecast.expect_weight(5.0);
        assert_eq!(forecast.next_if_last(MEAN), Some(ExpectedWeight(Some(5.0))));
        forecast.micro_step_added(Some(5.0));
        assert_eq!(forecast.next_if_last(MEAN), None);
    }

    #[cfg(feature = "train")]
    #[test]
    fn what_was_told_of_one_micro_step_holds_for_that_one() {
        let mut forecast = Forecast::new(Some(1));
        forecast.micro_step_added(None);
        forecast.expect_last(true);
        assert!(forecast.is_last());
        forecast.micro_step_added(None);
        assert!(!forecast.is_last());
        forecast.window_discarded();
        forecast.expect_weight(0.0);
        assert_eq!(forecast.next_if_last(MEAN), None);
    }
}
