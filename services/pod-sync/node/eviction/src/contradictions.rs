//! Thresholds that contradict each other, or the capacity of what they limit. The kubelet accepts them.

use quintlet_model::quantity::Quantity;

use crate::signal::Signal;
use crate::thresholds::Threshold;

/// A soft threshold that is crossed no earlier than a hard one, so that it never has an effect.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WithoutEffect {
    /// The threshold that has no effect.
    pub soft: Threshold,
    /// The hard threshold of the same signal.
    pub hard: Threshold,
    /// The capacity of the signal, if it is known.
    pub capacity: Option<Quantity>,
}

/// A threshold that stays crossed whatever is reclaimed: with its minimum reclaim, it is above the capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AboveCapacity {
    /// The threshold that is always crossed.
    pub threshold: Threshold,
    /// The capacity of its signal.
    pub capacity: Quantity,
}

/// Returns the soft thresholds that are not above each hard one of their signal. `capacity` returns the
/// capacity of a signal; without it an amount and a share are not compared.
#[must_use]
pub fn without_effect(
    thresholds: &[Threshold],
    capacity: impl Fn(Signal) -> Option<Quantity>,
) -> Vec<WithoutEffect> {
    let pairs = thresholds.iter().filter(|t| !t.is_hard()).filter_map(|soft| {
        let capacity = capacity(soft.signal);
        let is_below = |hard: &&Threshold| soft.value.is_above(hard.value, capacity) == Some(false);
        let of_signal = thresholds.iter().filter(|t| t.is_hard() && t.signal == soft.signal);
        Some(WithoutEffect { soft: *soft, hard: *of_signal.clone().find(is_below)?, capacity })
    });
    pairs.collect()
}

/// Returns the thresholds of signals with a known capacity that are above it, together with their minimum
/// reclaim.
#[must_use]
pub fn above_capacity(
    thresholds: &[Threshold],
    capacity: impl Fn(Signal) -> Option<Quantity>,
) -> Vec<AboveCapacity> {
    let above = thresholds.iter().filter_map(|threshold| {
        let capacity = capacity(threshold.signal)?;
        let reclaim = threshold.minimum_reclaim.map(|reclaim| reclaim.of(capacity)).unwrap_or_default();
        (threshold.value.of(capacity) + reclaim > capacity)
            .then_some(AboveCapacity { threshold: *threshold, capacity })
    });
    above.collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use quintlet_model::quantity::Format;

    use super::*;
    use crate::support::{MIB, bytes, hard, soft};
    use crate::thresholds::Amount;

    const GRACE: Duration = Duration::from_secs(30);

    fn gibibyte(_: Signal) -> Option<Quantity> {
        Some(Quantity::from_units(1 << 30, Format::Binary))
    }

    fn share(threshold: Threshold, percent: f32) -> Threshold {
        Threshold { value: Amount::Share(percent / 100.0), ..threshold }
    }

    #[test]
    fn a_soft_threshold_has_an_effect_only_above_the_hard_ones_of_its_signal() {
        let memory = Signal::MemoryAvailable;
        let hard_one = |mib: i64| hard(memory, mib * MIB);
        let soft_one = |mib: i64| soft(memory, mib * MIB, GRACE);
        let at_once = |mib: i64| soft(memory, mib * MIB, Duration::ZERO);
        // The thresholds, whether one has no effect on a node with 1 GiB, and if the capacity is unknown.
        for (thresholds, known, unknown) in [
            (vec![hard_one(100), soft_one(101)], false, false),
            (vec![hard_one(100), soft_one(100)], true, true),
            (vec![share(hard_one(0), 10.0), share(soft_one(0), 10.0)], true, true),
            (vec![share(hard_one(0), 10.0), share(soft_one(0), 10.5)], false, false),
            // 10% are 102.4 MiB.
            (vec![share(hard_one(0), 10.0), soft_one(102)], true, false),
            (vec![share(hard_one(0), 10.0), soft_one(103)], false, false),
            (vec![hard_one(102), share(soft_one(0), 10.0)], false, false),
            (vec![hard_one(103), share(soft_one(0), 10.0)], true, false),
            (vec![hard_one(50), hard_one(200), soft_one(100)], true, true),
            (vec![hard_one(100), at_once(50)], false, false),
            (vec![hard(Signal::PidAvailable, 100 * MIB), soft_one(50)], false, false),
            (vec![soft_one(50)], false, false),
        ] {
            let found =
                |pairs: Vec<WithoutEffect>| pairs.first().is_some_and(|pair| pair.soft.grace == GRACE);
            assert_eq!(found(without_effect(&thresholds, gibibyte)), known, "{thresholds:?}");
            assert_eq!(found(without_effect(&thresholds, |_| None)), unknown, "{thresholds:?}");
        }
    }

    #[test]
    fn a_threshold_above_the_capacity_is_named_with_its_minimum_reclaim() {
        let with =
            |threshold: Threshold, reclaim: Amount| Threshold { minimum_reclaim: Some(reclaim), ..threshold };
        let signal = Signal::NodeFsAvailable;
        for (threshold, want) in [
            (hard(signal, 1024 * MIB), false),
            (hard(signal, 1024 * MIB + 1), true),
            (share(hard(signal, 0), 100.0), false),
            (with(share(hard(signal, 0), 50.0), bytes(512 * MIB)), false),
            (with(share(hard(signal, 0), 50.0), bytes(512 * MIB + 1)), true),
            (with(hard(signal, 600 * MIB), Amount::Share(0.5)), true),
            (with(hard(signal, i64::MAX), bytes(i64::MAX)), true),
        ] {
            assert_eq!(above_capacity(&[threshold], gibibyte).len(), usize::from(want), "{threshold:?}");
            assert_eq!(above_capacity(&[threshold], |_| None), []);
        }
    }
}
