//! Rules about reservations, evictions and cgroups (`pkg/kubelet/apis/config/validation`, `pkg/kubelet/cm`).

use std::collections::BTreeMap;

use quintlet_model::go_duration;
use quintlet_model::quantity::Quantity;

use super::view::View;
use crate::diagnostics::Diagnostic;
use crate::node::{Data, LocatedValue};
use crate::table::{DEFAULT_POD_SYSCTLS, Document, MEMORY_QOS, QOS_RESERVED};

const HARD: &str = "evictionHard";

pub(super) fn check(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    for rule in [allocatable, reserved_memory, eviction] {
        rule(view, out);
    }
}

fn allocatable(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    const FIELD: &str = "enforceNodeAllocatable";
    let words = view.words(FIELD);
    let has = |word: &str| words.contains(&word);
    let mut report = |message: String| out.push(view.blame(&[FIELD], message));
    for (at, word) in words.iter().enumerate() {
        if words.iter().position(|w| w == word) != Some(at) {
            report(format!("duplicate element {word}"));
        }
    }
    if has("none") && words.len() > 1 {
        report("none must be the only element".to_owned());
    }
    for kind in ["system", "kube"] {
        let (whole, part) = (format!("{kind}-reserved"), format!("{kind}-reserved-compressible"));
        let cgroup = format!("{kind}ReservedCgroup");
        if has(&whole) && has(&part) {
            report(format!("{whole} and {part} exclude each other"));
        }
        for word in [&whole, &part] {
            if has(word) && view.text(&cgroup).is_empty() {
                report(format!("{word} needs {cgroup}"));
            }
        }
    }
    let enforced = words.iter().any(|w| *w != "none");
    if enforced && !view.is("cgroupsPerQOS") {
        out.push(view.blame(
            &["cgroupsPerQOS", FIELD],
            format!("false: {FIELD} must be [] or [none] then, but is [{}]", words.join(", ")),
        ));
    }
    for (field, gate) in [("qosReserved", QOS_RESERVED), ("defaultPodSysctls", DEFAULT_POD_SYSCTLS)] {
        let set = view.node(field).filter(|n| n.origin.is_set() && !n.entries().is_empty());
        if let Some(value) = set.filter(|_| !view.gate(gate)) {
            let message = format!("has no effect without featureGates.{gate}: true");
            out.push(Diagnostic::warning(value.origin.clone(), field, message));
        }
    }
    if view.text("memoryReservationPolicy") == "TieredReservation" && !view.gate(MEMORY_QOS) {
        let message = format!("TieredReservation: needs featureGates.{MEMORY_QOS}: true");
        out.push(view.blame(&["memoryReservationPolicy"], message));
    }
    // A file of an earlier kubelet may have the default of that time.
    let factor = match view.node("memoryThrottlingFactor").map(|node| &node.data) {
        Some(Data::Float(factor)) => Some(factor.to_string()),
        Some(Data::Int(factor)) => Some(factor.to_string()),
        Some(Data::Null | Data::Bool(_) | Data::Text(_) | Data::List(_) | Data::Map(_)) | None => None,
    };
    if let Some(factor) = factor.filter(|factor| !view.gate(MEMORY_QOS) && factor != "0.9") {
        let message = format!("{factor}: needs featureGates.{MEMORY_QOS}: true");
        out.push(view.blame(&["memoryThrottlingFactor"], message));
    }
    if !view.text("systemCgroups").is_empty() && view.node("cgroupRoot").is_none_or(|n| !n.origin.is_set()) {
        out.push(view.blame(&["systemCgroups"], "needs cgroupRoot".to_owned()));
    }
    if view.text("systemCgroups") == "/" {
        out.push(view.blame(&["systemCgroups"], "system container cannot be root (\"/\")".to_owned()));
    }
    if !view.text("reservedSystemCPUs").is_empty() {
        for cgroup in ["systemReservedCgroup", "kubeReservedCgroup"] {
            if !view.text(cgroup).is_empty() {
                out.push(view.blame(&[cgroup], "excludes reservedSystemCPUs".to_owned()));
            }
        }
    }
}

/// Checks soft thresholds against grace periods, and against the hard thresholds in [`HARD`].
fn eviction(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    let graces = view.node("evictionSoftGracePeriod").map(LocatedValue::entries).unwrap_or_default();
    let soft = view.node("evictionSoft").map(LocatedValue::entries).unwrap_or_default();
    for entry in soft.iter().filter(|e| !graces.iter().any(|g| g.key == e.key)) {
        let path = format!("evictionSoft.{}", entry.key);
        let message = format!("needs a grace period, evictionSoftGracePeriod.{}", entry.key);
        out.push(Diagnostic::error(entry.origin.clone(), path, message));
    }
    for entry in soft {
        let Some(hard) = hard_threshold(view, &entry.key) else { continue };
        let grace = graces.iter().find(|g| g.key == entry.key).and_then(|g| g.value.text());
        // Without a grace period the threshold is a hard one as well.
        let is_soft = grace.is_some_and(|text| go_duration::parse(text).is_ok_and(|nanos| nanos > 0));
        let value = entry.value.text().unwrap_or_default();
        if is_soft && is_above(value, &hard) == Some(false) {
            let path = format!("evictionSoft.{}", entry.key);
            let message = format!("{value} is not above {HARD}.{} {hard}, and has no effect", entry.key);
            out.push(Diagnostic::error(entry.value.origin.clone(), path, message));
        }
    }
    minimum_reclaim(view, out);
    for field in [HARD, "evictionSoft"] {
        let set = view.node(field).map(LocatedValue::entries).unwrap_or_default();
        for entry in set.iter().filter(|entry| entry.key.starts_with("containerfs.")) {
            let message = "ignored, the threshold of nodefs or imagefs applies";
            out.push(Diagnostic::warning(entry.origin.clone(), format!("{field}.{}", entry.key), message));
        }
    }
    for entry in graces.iter().filter(|g| !soft.iter().any(|e| e.key == g.key)) {
        let path = format!("evictionSoftGracePeriod.{}", entry.key);
        out.push(Diagnostic::warning(entry.origin.clone(), path, "has no evictionSoft threshold"));
    }
}

/// Warns of a minimum reclaim without a threshold, and of a threshold that is more than the capacity with its
/// minimum reclaim: once it is crossed, all pods are evicted. The kubelet accepts both. pod-sync compares
/// amounts with the capacity.
fn minimum_reclaim(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    let percent = |text: &str| text.strip_suffix('%').and_then(|percent| percent.parse::<f64>().ok());
    let soft = |signal: &str| view.node("evictionSoft")?.get(signal)?.text().map(str::to_owned);
    for entry in view.node("evictionMinimumReclaim").map(LocatedValue::entries).unwrap_or_default() {
        let value = entry.value.text().unwrap_or_default();
        let thresholds = [(HARD, hard_threshold(view, &entry.key)), ("evictionSoft", soft(&entry.key))];
        if thresholds.iter().all(|(_, threshold)| threshold.is_none()) {
            let path = format!("evictionMinimumReclaim.{}", entry.key);
            out.push(Diagnostic::warning(entry.origin.clone(), path, "has no threshold"));
        }
        for (field, threshold) in thresholds {
            let Some(threshold) = threshold else { continue };
            let sum = percent(value).zip(percent(&threshold)).map(|(more, threshold)| more + threshold);
            // Thousandths, since decimal fractions are not exact.
            if sum.is_some_and(|sum| (sum * 1000.0).round() > 100_000.0) {
                let path = format!("evictionMinimumReclaim.{}", entry.key);
                let message =
                    format!("{value} and {field}.{} {threshold} are more than the capacity", entry.key);
                out.push(Diagnostic::warning(entry.value.origin.clone(), path, message));
            }
        }
    }
}

/// Returns the hard threshold of a signal. 0% and 100% switch it off.
fn hard_threshold(view: &View<'_>, signal: &str) -> Option<String> {
    let threshold = |hard: &LocatedValue| hard.get(signal).and_then(LocatedValue::text).map(str::to_owned);
    let default = || {
        let row = Document::Kubelet.rows().iter().find(|row| row.field == HARD)?;
        view.is("mergeDefaultEvictionSettings").then(|| row.default_node()).flatten()
    };
    let hard = view.node(HARD).and_then(threshold).or_else(|| threshold(&default()?))?;
    (!matches!(hard.as_str(), "0%" | "100%")).then_some(hard)
}

/// Returns whether a threshold is above another one; `None` if that depends on the capacity, or if one is
/// invalid.
fn is_above(threshold: &str, other: &str) -> Option<bool> {
    let percent = |text: &str| text.strip_suffix('%').map(|percent| percent.parse::<f64>().ok());
    match (percent(threshold), percent(other)) {
        (Some(threshold), Some(other)) => Some(threshold? > other?),
        (None, None) => Some(Quantity::parse(threshold).ok()? > Quantity::parse(other).ok()?),
        (Some(_), None) | (None, Some(_)) => None,
    }
}

/// Checks the kinds of memory, and that each is reserved once per NUMA node
/// (`validateReservedMemoryConfiguration`).
fn reserved_memory(view: &View<'_>, out: &mut Vec<Diagnostic>) {
    const FIELD: &str = "reservedMemory";
    let mut seen: BTreeMap<(String, &str), usize> = BTreeMap::new();
    for (at, reservation) in
        view.node(FIELD).map(LocatedValue::elements).unwrap_or_default().iter().enumerate()
    {
        let numa = reservation.get("numaNode").map(|n| n.data.to_string()).unwrap_or_default();
        for limit in reservation.get("limits").map(LocatedValue::entries).unwrap_or_default() {
            let mut report = |message: String| {
                let path = format!("{FIELD}[{at}].limits.{}", limit.key);
                out.push(Diagnostic::error(limit.origin.clone(), path, message));
            };
            if limit.key != "memory" && !limit.key.starts_with("hugepages-") {
                report("only memory and hugepages-SIZE can be reserved per NUMA node".to_owned());
            }
            let amount = limit.value.text().and_then(|text| Quantity::parse(text).ok());
            if amount.is_some_and(|amount| amount == Quantity::default()) {
                report("must not be zero".to_owned());
            }
            if let Some(first) = seen.insert((numa.clone(), &limit.key), at) {
                report(format!("is already reserved for NUMA node {numa} by [{first}]"));
            }
        }
    }
}
