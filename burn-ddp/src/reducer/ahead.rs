//! What is known of a backward pass before it runs.
//!
//! A gradient can leave during a backward pass only if that pass is the window's last, and only weighed, so both must be
//! known ahead. Where they are not, everything waits for [`Reducer::reduce`](super::Reducer::reduce).

#[cfg(any(test, feature = "overlap"))]
use super::GradientReduction;

/// The weight of the micro-step whose backward pass comes next; `None` if micro-steps have none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Expected(pub(super) Option<f64>);

/// What was told and what was learned from windows and micro-steps before.
#[derive(Debug)]
#[cfg_attr(not(any(test, feature = "overlap")), allow(dead_code, reason = "only overlap looks ahead"))]
pub(super) struct Ahead {
    /// Micro-steps of a window, where the caller says it.
    told: Option<usize>,
    /// Micro-steps of the longest window so far: one that ends early, as at the end of an epoch, changes nothing.
    longest: Option<usize>,
    /// Whether micro-steps have weights.
    weighted: Option<bool>,
    /// Micro-steps of this window so far, those without items too.
    micro_steps: usize,
    /// Told of the next micro-step: whether it is the window's last.
    last: Option<bool>,
    /// Told of the next micro-step: its weight.
    weight: Option<f64>,
}

impl Ahead {
    pub(super) fn new(told: Option<usize>) -> Self {
        Self { told, longest: None, weighted: None, micro_steps: 0, last: None, weight: None }
    }

    #[cfg(feature = "train")]
    pub(super) fn expect_last(&mut self, last: bool) {
        self.last = Some(last);
    }

    pub(super) fn expect_weight(&mut self, weight: f64) {
        self.weight = Some(weight);
    }

    /// Whether the next micro-step is expected to be the window's last.
    #[cfg(any(test, feature = "overlap"))]
    pub(super) fn is_last(&self) -> bool {
        let length = self.told.or(self.longest);
        self.last.unwrap_or_else(|| length.is_some_and(|length| self.micro_steps + 1 == length))
    }

    /// The weight of the next micro-step, if that is the window's last and its weight is known.
    #[cfg(any(test, feature = "overlap"))]
    pub(super) fn next(&self, reduction: GradientReduction) -> Option<Expected> {
        match (self.weight, self.weighted, reduction) {
            _ if !self.is_last() => None,
            (Some(weight), ..) => (weight > 0.0).then_some(Expected(Some(weight))),
            (None, Some(false), _) | (None, _, GradientReduction::Sum) => Some(Expected(None)),
            (None, ..) => None,
        }
    }

    /// The number of the micro-step under way in its window, from 1.
    pub(super) fn number(&self) -> usize {
        self.micro_steps + 1
    }

    /// A micro-step was handed over.
    pub(super) fn passed(&mut self, weight: Option<f64>) {
        if weight != Some(0.0) {
            self.weighted = Some(self.weighted == Some(true) || weight.is_some());
        }
        self.micro_steps += 1;
        (self.last, self.weight) = (None, None);
    }

    /// The window was reduced.
    pub(super) fn ended(&mut self) {
        self.longest = self.longest.max(Some(self.micro_steps));
        self.forget();
    }

    /// The window came to nothing.
    pub(super) fn forget(&mut self) {
        self.micro_steps = 0;
        (self.last, self.weight) = (None, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEAN: GradientReduction = GradientReduction::Mean;

    fn window(ahead: &mut Ahead, weights: &[Option<f64>]) -> Vec<bool> {
        let step = |weight: &Option<f64>| {
            let open = ahead.next(MEAN).is_some();
            ahead.passed(*weight);
            open
        };
        let open = weights.iter().map(step).collect();
        ahead.ended();
        open
    }

    #[test]
    fn a_length_that_was_told_holds_from_the_first_window() {
        let mut ahead = Ahead::new(Some(3));
        assert_eq!(window(&mut ahead, &[None; 3]), [false, false, true]);
        assert_eq!(window(&mut ahead, &[None; 2]), [false, false]);
        assert_eq!(window(&mut ahead, &[None; 3]), [false, false, true]);
    }

    #[test]
    fn the_longest_window_is_learned_and_a_short_one_is_not() {
        let mut ahead = Ahead::new(None);
        assert_eq!(window(&mut ahead, &[None; 3]), [false; 3]);
        assert_eq!(window(&mut ahead, &[None; 2]), [false; 2]);
        assert_eq!(window(&mut ahead, &[None; 3]), [false, false, true]);
    }

    #[test]
    fn weights_are_asked_for_once_one_was_seen() {
        let mut ahead = Ahead::new(Some(1));
        // Nothing is known of weights before the first micro-step.
        assert_eq!(window(&mut ahead, &[None]), [false]);
        assert_eq!(window(&mut ahead, &[Some(2.0)]), [true]);
        assert_eq!(window(&mut ahead, &[None]), [false]);
        assert_eq!(ahead.next(GradientReduction::Sum), Some(Expected(None)));
        ahead.expect_weight(5.0);
        assert_eq!(ahead.next(MEAN), Some(Expected(Some(5.0))));
        ahead.passed(Some(5.0));
        assert_eq!(ahead.next(MEAN), None);
    }

    #[cfg(feature = "train")]
    #[test]
    fn what_was_told_of_one_micro_step_holds_for_that_one() {
        let mut ahead = Ahead::new(Some(1));
        ahead.passed(None);
        ahead.expect_last(true);
        assert!(ahead.is_last());
        ahead.passed(None);
        assert!(!ahead.is_last());
        ahead.forget();
        ahead.expect_weight(0.0);
        assert_eq!(ahead.next(MEAN), None);
    }
}
