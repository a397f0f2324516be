//! Thresholds of the configuration (`pkg/kubelet/eviction: ParseThresholdConfig`).

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as ApiQuantity;
use pod_sync_decisions::qos::ResourceList;
use quintlet_model::quantity::{Format, InvalidQuantity, Quantity};

use crate::layout::Layout;
use crate::signal::Signal;

/// Hard thresholds of a configuration without `evictionHard` (`pkg/kubelet/eviction: DefaultEvictionHard`).
pub const DEFAULT_HARD: [(&str, &str); 5] = [
    ("memory.available", "100Mi"),
    ("nodefs.available", "10%"),
    ("nodefs.inodesFree", "5%"),
    ("imagefs.available", "15%"),
    ("imagefs.inodesFree", "5%"),
];

/// An amount of what a signal measures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Amount {
    /// A fixed amount.
    Quantity(Quantity),
    /// A share of the capacity, from 0 to 1. The kubelet stores it in 32 bits, which the amounts in messages
    /// show.
    Share(f32),
}

impl Amount {
    /// Returns the amount for a capacity (`GetThresholdQuantity`).
    #[must_use]
    pub fn of(self, capacity: Quantity) -> Quantity {
        match self {
            Self::Quantity(quantity) => quantity,
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_precision_loss,
                reason = "as the kubelet computes it; the cast saturates"
            )]
            Self::Share(share) => {
                Quantity::from_units((capacity.value() as f64 * f64::from(share)) as i64, Format::Binary)
            }
        }
    }

    /// Returns the share in percent, or `None` for a fixed amount.
    #[must_use]
    pub fn percent(self) -> Option<f32> {
        match self {
            Self::Quantity(_) => None,
            Self::Share(share) => Some(share * 100.0),
        }
    }

    /// Formats an amount; a share with the capacity that it is a share of, if that is known.
    #[must_use]
    pub fn text(self, capacity: Option<Quantity>) -> String {
        match (self, capacity) {
            (Self::Share(_), Some(capacity)) => format!("{self} of {capacity}"),
            (Self::Quantity(_), _) | (Self::Share(_), None) => self.to_string(),
        }
    }

    /// Returns whether the amount is above another one. Without a capacity, an amount and a share cannot be
    /// compared.
    #[must_use]
    pub fn is_above(self, other: Self, capacity: Option<Quantity>) -> Option<bool> {
        match (self, other) {
            (Self::Quantity(one), Self::Quantity(other)) => Some(one > other),
            (Self::Share(one), Self::Share(other)) => Some(one > other),
            (Self::Quantity(_), Self::Share(_)) | (Self::Share(_), Self::Quantity(_)) => {
                let capacity = capacity?;
                Some(self.of(capacity) > other.of(capacity))
            }
        }
    }

    fn parse(signal: Signal, text: &str) -> Result<Self, ThresholdError> {
        let Some(percent) = text.strip_suffix('%') else {
            let invalid = |source| ThresholdError::Quantity { signal, source };
            return Quantity::parse(text).map(Self::Quantity).map_err(invalid);
        };
        match percent.parse::<f32>() {
            Ok(percent) if percent.is_finite() => Ok(Self::Share(percent / 100.0)),
            Ok(_) | Err(_) => Err(ThresholdError::Percentage { signal, text: text.to_owned() }),
        }
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Quantity(quantity) => quantity.fmt(f),
            // A share is not exact in 32 bits.
            Self::Share(share) => write!(f, "{}%", (f64::from(*share) * 100_000.0).round() / 1000.0),
        }
    }
}

/// When the node must get back an amount of a resource.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Threshold {
    /// The measured quantity.
    pub signal: Signal,
    /// The threshold is crossed while less than this is available.
    pub value: Amount,
    /// Time for which the threshold must be crossed before anything is reclaimed. Zero makes it a hard
    /// threshold.
    pub grace: Duration,
    /// Amount above `value` that must be available before reclaiming ends.
    pub minimum_reclaim: Option<Amount>,
}

impl Threshold {
    /// Returns whether reclaiming begins at once.
    #[must_use]
    pub fn is_hard(&self) -> bool {
        self.grace.is_zero()
    }

    // The minimum reclaim does not identify a threshold.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        (self.signal, self.value, self.grace) == (other.signal, other.value, other.grace)
    }
}

/// The fields of KubeletConfiguration about thresholds. Durations have been parsed.
#[derive(Debug, Clone, Copy, Default)]
pub struct ThresholdConfig<'a> {
    /// `evictionHard`; `None` if it is not set.
    pub hard: Option<&'a [(String, String)]>,
    /// `evictionSoft`.
    pub soft: &'a [(String, String)],
    /// `evictionSoftGracePeriod`.
    pub soft_grace: &'a [(String, Duration)],
    /// `evictionMinimumReclaim`.
    pub minimum_reclaim: &'a [(String, String)],
    /// `mergeDefaultEvictionSettings`: signals that `evictionHard` does not name keep their default.
    pub merge_defaults: bool,
    /// `enforceNodeAllocatable` has `pods`, so the memory of all pods together has a limit.
    pub enforces_pods: bool,
}

/// A threshold that cannot be used. The texts are the kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ThresholdError {
    /// The signal does not exist.
    #[error("unsupported eviction signal {0}")]
    Signal(String),
    /// The text is no quantity.
    #[error("eviction threshold {signal}: {source}")]
    Quantity {
        /// Signal of the threshold.
        signal: Signal,
        /// Description of the error.
        source: InvalidQuantity,
    },
    /// The text before the percent sign is no number.
    #[error("eviction threshold {signal}: {text:?} is not a percentage")]
    Percentage {
        /// Signal of the threshold.
        signal: Signal,
        /// Text of the configuration.
        text: String,
    },
    /// A quantity of zero or less.
    #[error("eviction threshold {0} must be positive: {1}")]
    NotPositive(Signal, String),
    /// A percentage below zero.
    #[error("eviction percentage threshold {0} must be >= 0%: {1}")]
    Negative(Signal, String),
    /// A percentage above 100.
    #[error("eviction percentage threshold {0} must be <= 100%: {1}")]
    AboveCapacity(Signal, String),
    /// A soft threshold without a grace period.
    #[error("grace period must be specified for the soft eviction threshold {0}")]
    NoGracePeriod(Signal),
    /// A minimum reclaim below zero.
    #[error("negative eviction minimum reclaim specified for {0}")]
    NegativeReclaim(Signal),
    /// A minimum reclaim of zero percent or less.
    #[error("eviction percentage minimum reclaim {0} must be positive: {1}")]
    ReclaimNotPositive(Signal, String),
    /// The soft threshold would be crossed after the hard one, and never have an effect. The kubelet accepts
    /// it.
    #[error("the soft eviction threshold {signal} of {soft} is not above the hard one of {hard}")]
    SoftBelowHard {
        /// Signal of both thresholds.
        signal: Signal,
        /// Soft threshold.
        soft: String,
        /// Hard threshold.
        hard: String,
    },
}

/// Returns the thresholds of a configuration, hard ones first.
///
/// # Errors
/// Fails if a threshold cannot be used, or contradicts another one.
pub fn parse(config: &ThresholdConfig<'_>) -> Result<Vec<Threshold>, ThresholdError> {
    let defaults = || DEFAULT_HARD.map(|(signal, value)| (signal.to_owned(), value.to_owned())).to_vec();
    let hard = match config.hard {
        None => defaults(),
        Some(set) if config.merge_defaults => {
            let is_set = |name: &str| set.iter().any(|(set, _)| set == name);
            let unset = defaults().into_iter().filter(|(name, _)| !is_set(name));
            set.iter().cloned().chain(unset).collect()
        }
        Some(set) => set.to_vec(),
    };
    let mut thresholds = statements(&hard)?;
    let mut soft = statements(config.soft)?;
    for (name, _) in config.soft_grace {
        Signal::parse(name).ok_or_else(|| ThresholdError::Signal(name.clone()))?;
    }
    for threshold in &mut soft {
        let name = threshold.signal.as_str();
        let grace = config.soft_grace.iter().find(|(signal, _)| signal == name);
        threshold.grace = grace.ok_or(ThresholdError::NoGracePeriod(threshold.signal))?.1;
        check_above_hard(threshold, &thresholds)?;
    }
    thresholds.extend(soft);
    for (name, text) in config.minimum_reclaim {
        let reclaim = minimum_reclaim(name, text)?;
        for threshold in thresholds.iter_mut().filter(|t| t.signal.as_str() == name) {
            threshold.minimum_reclaim = Some(reclaim);
        }
    }
    if config.enforces_pods {
        let memory = thresholds.iter().filter(|t| t.signal == Signal::MemoryAvailable && t.is_hard());
        let copies: Vec<_> =
            memory.map(|t| Threshold { signal: Signal::AllocatableMemoryAvailable, ..*t }).collect();
        thresholds.extend(copies);
    }
    Ok(thresholds)
}

/// Returns the amounts that hard eviction keeps free, by resource
/// (`pkg/kubelet/cm: hardEvictionReservations`).
#[must_use]
pub fn hard_reservations(hard: &[Threshold], capacity: &BTreeMap<String, ApiQuantity>) -> ResourceList {
    let resources = [(Signal::MemoryAvailable, "memory"), (Signal::NodeFsAvailable, "ephemeral-storage")];
    let reservation = |threshold: &Threshold| {
        let (_, resource) = resources.into_iter().find(|(signal, _)| *signal == threshold.signal)?;
        let whole = capacity.get(resource).map(Quantity::of).unwrap_or_default();
        Some((resource.to_owned(), threshold.value.of(whole)))
    };
    hard.iter().filter_map(reservation).collect()
}

/// Replaces the thresholds of the file system of writable layers by those of the file system that it is on,
/// or that the kubelet takes for it (`UpdateContainerFsThresholds`).
#[must_use]
pub fn with_container_fs(thresholds: &[Threshold], layout: Layout) -> Vec<Threshold> {
    let is_own =
        |t: &&Threshold| matches!(t.signal, Signal::ContainerFsAvailable | Signal::ContainerFsInodesFree);
    let (available, inodes) = match layout {
        Layout::Single | Layout::Split => (Signal::NodeFsAvailable, Signal::NodeFsInodesFree),
        Layout::SeparateImages => (Signal::ImageFsAvailable, Signal::ImageFsInodesFree),
    };
    let copies = thresholds.iter().filter_map(|t| {
        let signal = match t.signal {
            signal if signal == available => Signal::ContainerFsAvailable,
            signal if signal == inodes => Signal::ContainerFsInodesFree,
            _ => return None,
        };
        Some(Threshold { signal, ..*t })
    });
    thresholds.iter().filter(|t| !is_own(t)).copied().chain(copies).collect()
}

fn statements(texts: &[(String, String)]) -> Result<Vec<Threshold>, ThresholdError> {
    let parsed = texts.iter().map(|(name, text)| statement(name, text));
    parsed.filter_map(Result::transpose).collect()
}

/// Returns `None` for a signal that is switched off.
fn statement(name: &str, text: &str) -> Result<Option<Threshold>, ThresholdError> {
    let signal = Signal::parse(name).ok_or_else(|| ThresholdError::Signal(name.to_owned()))?;
    if matches!(text, "0%" | "100%") {
        return Ok(None);
    }
    let value = Amount::parse(signal, text)?;
    match value {
        Amount::Quantity(q) if !q.is_positive() => Err(ThresholdError::NotPositive(signal, q.to_string())),
        Amount::Share(share) if share < 0.0 => Err(ThresholdError::Negative(signal, text.to_owned())),
        Amount::Share(share) if share > 1.0 => Err(ThresholdError::AboveCapacity(signal, text.to_owned())),
        Amount::Quantity(_) | Amount::Share(_) => {
            Ok(Some(Threshold { signal, value, grace: Duration::ZERO, minimum_reclaim: None }))
        }
    }
}

fn minimum_reclaim(name: &str, text: &str) -> Result<Amount, ThresholdError> {
    let signal = Signal::parse(name).ok_or_else(|| ThresholdError::Signal(name.to_owned()))?;
    match Amount::parse(signal, text)? {
        Amount::Quantity(q) if q < Quantity::default() => Err(ThresholdError::NegativeReclaim(signal)),
        Amount::Share(share) if share <= 0.0 => {
            Err(ThresholdError::ReclaimNotPositive(signal, text.to_owned()))
        }
        amount @ (Amount::Quantity(_) | Amount::Share(_)) => Ok(amount),
    }
}

fn check_above_hard(soft: &Threshold, hard: &[Threshold]) -> Result<(), ThresholdError> {
    let Some(hard) = hard.iter().find(|t| t.signal == soft.signal) else { return Ok(()) };
    if soft.is_hard() || soft.value.is_above(hard.value, None) != Some(false) {
        return Ok(());
    }
    let [soft_text, hard_text] = [soft, hard].map(|threshold| threshold.value.to_string());
    Err(ThresholdError::SoftBelowHard { signal: soft.signal, soft: soft_text, hard: hard_text })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    }

    fn shown(thresholds: &[Threshold]) -> Vec<String> {
        let show = |t: &Threshold| {
            let reclaim = t.minimum_reclaim.map_or_else(String::new, |r| format!(" +{r}"));
            format!("{} {} {:?}{reclaim}", t.signal, t.value, t.grace)
        };
        thresholds.iter().map(show).collect()
    }

    #[test]
    fn hard_eviction_reserves_memory_and_disk_as_amounts_or_shares_of_the_capacity() {
        let capacity = [("memory", "1000Ki"), ("ephemeral-storage", "101430960Ki")];
        let capacity =
            capacity.map(|(name, amount)| (name.to_owned(), ApiQuantity(amount.to_owned()))).into();
        let reserved = |hard: &[(&str, &str)]| {
            let hard = pairs(hard);
            let hard = parse(&ThresholdConfig { hard: Some(&hard), ..ThresholdConfig::default() }).unwrap();
            let reserved = hard_reservations(&hard, &capacity).into_iter();
            reserved.map(|(name, amount)| (name, amount.value())).collect::<Vec<_>>()
        };
        assert_eq!(reserved(&[]), []);
        // The allocatable storage of such a node is 93478772582 bytes with a kubelet, which stores
        // percentages in 32 bits.
        let disk = ("ephemeral-storage".to_owned(), 103_865_303_040 - 93_478_772_582);
        let both = [("memory.available", "100Ki"), ("nodefs.available", "10%"), ("nodefs.inodesFree", "5%")];
        assert_eq!(reserved(&both), [disk, ("memory".to_owned(), 100 << 10)]);
        assert_eq!(reserved(&[("memory.available", "2.5%")]), [("memory".to_owned(), 25 << 10)]);
        assert_eq!(reserved(&[("memory.available", "0%")]), []);
    }

    #[test]
    fn a_map_of_hard_thresholds_replaces_the_defaults_unless_they_are_merged() {
        let all = ["memory.available 100Mi 0ns", "nodefs.available 10% 0ns", "nodefs.inodesFree 5% 0ns"];
        let images = ["imagefs.available 15% 0ns", "imagefs.inodesFree 5% 0ns"];
        let default = parse(&ThresholdConfig::default()).unwrap();
        assert_eq!(shown(&default), [&all[..], &images[..]].concat());

        let hard = pairs(&[("memory.available", "1Gi"), ("imagefs.available", "0%")]);
        let config = ThresholdConfig { hard: Some(&hard), ..ThresholdConfig::default() };
        assert_eq!(shown(&parse(&config).unwrap()), ["memory.available 1Gi 0ns"]);

        let merged = parse(&ThresholdConfig { merge_defaults: true, ..config }).unwrap();
        let want = ["memory.available 1Gi 0ns", all[1], all[2], images[1]];
        assert_eq!(shown(&merged), want, "a signal that is off stays off");
    }

    #[test]
    fn soft_thresholds_have_grace_periods_and_every_threshold_its_minimum_reclaim() {
        let hard = pairs(&[("memory.available", "100Mi")]);
        let soft = pairs(&[("memory.available", "200Mi"), ("pid.available", "10%")]);
        let grace = [("memory.available", 30), ("pid.available", 0)];
        let grace = grace.map(|(name, s)| (name.to_owned(), Duration::from_secs(s)));
        let reclaim = pairs(&[("memory.available", "50Mi"), ("nodefs.available", "5%")]);
        let config = ThresholdConfig {
            hard: Some(&hard),
            soft: &soft,
            soft_grace: &grace,
            minimum_reclaim: &reclaim,
            enforces_pods: true,
            ..ThresholdConfig::default()
        };
        let want = [
            "memory.available 100Mi 0ns +50Mi",
            "memory.available 200Mi 30s +50Mi",
            "pid.available 10% 0ns",
            "allocatableMemory.available 100Mi 0ns +50Mi",
        ];
        assert_eq!(shown(&parse(&config).unwrap()), want);
    }

    #[test]
    fn thresholds_that_cannot_be_used_are_refused_with_the_texts_of_the_kubelet() {
        let grace = [("memory.available".to_owned(), Duration::from_secs(30))];
        for (hard, soft, reclaim, want) in [
            (("memory.free", "1Gi"), None, None, "unsupported eviction signal memory.free"),
            (
                ("memory.available", "0"),
                None,
                None,
                "eviction threshold memory.available must be positive: 0",
            ),
            (
                ("memory.available", "-1Gi"),
                None,
                None,
                "eviction threshold memory.available must be positive: -1Gi",
            ),
            (
                ("nodefs.available", "-1%"),
                None,
                None,
                "eviction percentage threshold nodefs.available must be >= 0%: -1%",
            ),
            (
                ("nodefs.available", "101%"),
                None,
                None,
                "eviction percentage threshold nodefs.available must be <= 100%: 101%",
            ),
            (
                ("nodefs.available", "NaN%"),
                None,
                None,
                "eviction threshold nodefs.available: \"NaN%\" is not a percentage",
            ),
            (
                ("nodefs.available", "x"),
                None,
                None,
                "eviction threshold nodefs.available: \"x\" is not a quantity",
            ),
            (
                ("memory.available", "1Gi"),
                Some(("nodefs.available", "5%")),
                None,
                "grace period must be specified for the soft eviction threshold nodefs.available",
            ),
            (
                ("memory.available", "1Gi"),
                Some(("memory.available", "1Gi")),
                None,
                "the soft eviction threshold memory.available of 1Gi is not above the hard one of 1Gi",
            ),
            (
                ("memory.available", "10%"),
                Some(("memory.available", "5%")),
                None,
                "the soft eviction threshold memory.available of 5% is not above the hard one of 10%",
            ),
            (
                ("memory.available", "1Gi"),
                None,
                Some(("memory.available", "-1")),
                "negative eviction minimum reclaim specified for memory.available",
            ),
            (
                ("memory.available", "1Gi"),
                None,
                Some(("memory.available", "0%")),
                "eviction percentage minimum reclaim memory.available must be positive: 0%",
            ),
            (("memory.available", "1Gi"), None, Some(("x", "1")), "unsupported eviction signal x"),
        ] {
            let (hard, soft) = (pairs(&[hard]), pairs(soft.as_slice()));
            let reclaim = pairs(reclaim.as_slice());
            let config = ThresholdConfig {
                hard: Some(&hard),
                soft: &soft,
                soft_grace: &grace,
                minimum_reclaim: &reclaim,
                ..ThresholdConfig::default()
            };
            assert_eq!(parse(&config).unwrap_err().to_string(), want);
        }
        let unknown = [("memory.free".to_owned(), Duration::from_secs(30))];
        let config = ThresholdConfig { soft_grace: &unknown, ..ThresholdConfig::default() };
        assert_eq!(parse(&config).unwrap_err().to_string(), "unsupported eviction signal memory.free");
    }

    #[test]
    fn writable_layers_have_the_thresholds_of_the_file_system_they_are_on() {
        let hard = pairs(&[
            ("nodefs.available", "10%"),
            ("nodefs.inodesFree", "5%"),
            ("imagefs.available", "15%"),
            ("containerfs.available", "50%"),
        ]);
        let parsed = parse(&ThresholdConfig { hard: Some(&hard), ..ThresholdConfig::default() }).unwrap();
        for (layout, want) in [
            (Layout::Single, vec!["containerfs.available 10% 0ns", "containerfs.inodesFree 5% 0ns"]),
            (Layout::Split, vec!["containerfs.available 10% 0ns", "containerfs.inodesFree 5% 0ns"]),
            (Layout::SeparateImages, vec!["containerfs.available 15% 0ns"]),
        ] {
            let all = shown(&with_container_fs(&parsed, layout));
            assert_eq!(
                all[..3],
                ["nodefs.available 10% 0ns", "nodefs.inodesFree 5% 0ns", "imagefs.available 15% 0ns"]
            );
            assert_eq!(all[3..], want, "{layout:?}");
        }
    }

    #[test]
    fn a_share_is_computed_in_32_bits_as_the_kubelet_does() {
        let capacity = Quantity::from_units(10_000_000_000, Format::Binary);
        // 10% in 32 bits is a little more than a tenth.
        assert_eq!(Amount::Share(10.0 / 100.0).of(capacity).value(), 1_000_000_014);
    }
}
