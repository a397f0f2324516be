//! Merges the OpenMetrics texts of several processes into one Prometheus text. Does no I/O.
//!
//! A family that several processes have, and every `quintlet_*` family, gets the label `service` (and
//! `instance`, if there may be several). Families of the kubelet keep their labels, as dashboards expect
//! them. Bounds of buckets are written as in the classic format, `le="1"`, where OpenMetrics has `le="1.0"`:
//! they are label values, and a query for the kubelet's would find nothing.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// The text of one process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    /// Value of the label `service`.
    pub service: &'a str,
    /// Name of the instance; empty if there is only one.
    pub instance: &'a str,
    /// Metrics in the text format of Prometheus or OpenMetrics.
    pub text: &'a str,
}

#[derive(Debug, Default)]
struct Family<'a> {
    kind: &'a str,
    help: &'a str,
    samples: Vec<(usize, &'a str)>,
    owners: BTreeSet<usize>,
}

/// Returns the labels that name the process of a sample.
#[must_use]
pub(crate) fn source_labels(service: &str, instance: &str) -> String {
    if instance.is_empty() {
        format!("service=\"{service}\"")
    } else {
        format!("service=\"{service}\",instance=\"{instance}\"")
    }
}

/// Merges all texts.
#[must_use]
pub(crate) fn merge(parts: &[Part<'_>]) -> String {
    let mut families: BTreeMap<&str, Family<'_>> = BTreeMap::new();
    for (owner, part) in parts.iter().enumerate() {
        let mut current = "";
        for line in part.text.lines() {
            let mut words = line.splitn(4, ' ');
            match (words.next(), words.next(), words.next(), words.next()) {
                (Some("#"), Some("HELP"), Some(name), help) => {
                    current = name;
                    families.entry(name).or_default().help = help.unwrap_or_default();
                }
                (Some("#"), Some("TYPE"), Some(name), kind) => {
                    current = name;
                    families.entry(name).or_default().kind = kind.unwrap_or_default();
                }
                (Some("#"), ..) | (None, ..) | (Some(""), ..) => {}
                // A sample belongs to the preceding family, unless its name differs.
                _ => {
                    let name = line.split(['{', ' ']).next().unwrap_or_default();
                    let family =
                        if name.starts_with(current) && !current.is_empty() { current } else { name };
                    let family = families.entry(family).or_default();
                    family.samples.push((owner, line));
                    family.owners.insert(owner);
                }
            }
        }
    }
    let mut out = String::new();
    for (name, family) in families {
        if family.samples.is_empty() {
            continue;
        }
        // The classic format names a counter with the suffix of its sample; OpenMetrics does not.
        let shown = if family.kind == "counter" { format!("{name}_total") } else { name.to_owned() };
        let kind = match family.kind {
            "counter" | "gauge" | "histogram" | "summary" => family.kind,
            "info" | "stateset" => "gauge",
            _ => "untyped",
        };
        // Writing to a String does not fail.
        let _ = writeln!(out, "# HELP {shown} {}\n# TYPE {shown} {kind}", family.help);
        let labelled = name.starts_with("quintlet_") || family.owners.len() > 1;
        for (owner, line) in &family.samples {
            let line = if family.kind == "histogram" { with_go_bound(line) } else { Cow::Borrowed(*line) };
            match parts.get(*owner).filter(|_| labelled) {
                Some(part) => out.push_str(&with_labels(&line, &source_labels(part.service, part.instance))),
                None => out.push_str(&line),
            }
            out.push('\n');
        }
    }
    out
}

/// Returns the sample of a bucket with its bound as Go writes it (`prometheus/common/expfmt: writeFloat`).
fn with_go_bound(line: &str) -> Cow<'_, str> {
    const BOUND: &str = "le=\"";
    let Some((before, rest)) = line.rsplit_once(BOUND) else { return Cow::Borrowed(line) };
    let Some((bound, after)) = rest.split_once('"') else { return Cow::Borrowed(line) };
    match bound.parse::<f64>() {
        Ok(number) if number.is_finite() => {
            Cow::Owned(format!("{before}{BOUND}{}\"{after}", go_number(number)))
        }
        Ok(_) | Err(_) => Cow::Borrowed(line),
    }
}

/// Formats a number as Go's `strconv.FormatFloat(number, 'g', -1, 64)`: the shortest form, with an exponent
/// of two digits from 1e+06 on and below 1e-04.
fn go_number(number: f64) -> String {
    let size = number.abs();
    if size == 0.0 || (1e-4..1e6).contains(&size) {
        return number.to_string();
    }
    let text = format!("{number:e}");
    let Some((digits, exponent)) = text.split_once('e') else { return text };
    let (sign, exponent) = match exponent.strip_prefix('-') {
        Some(exponent) => ('-', exponent),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{exponent:0>2}")
}

fn with_labels(line: &str, labels: &str) -> String {
    let name_end = line.find(['{', ' ']).unwrap_or(line.len());
    let (name, rest) = line.split_at(name_end);
    match rest.strip_prefix('{') {
        Some(rest) if rest.starts_with('}') => format!("{name}{{{labels}{rest}"),
        Some(rest) => format!("{name}{{{labels},{rest}"),
        None => format!("{name}{{{labels}}}{rest}"),
    }
}

/// Returns the families whose names are `wanted`.
#[must_use]
pub(crate) fn only(text: &str, wanted: impl Fn(&str) -> bool) -> String {
    let mut keep = false;
    text.lines()
        .filter(|line| {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                keep = wanted(rest.split(' ').next().unwrap_or_default());
            }
            keep
        })
        .flat_map(|line| [line, "\n"])
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const POD_SYNC: &str = "# HELP kubelet_started_pods Pods started.\n# TYPE kubelet_started_pods counter\n\
        kubelet_started_pods_total 3\n# HELP quintlet_socket_refused Refused.\n\
        # TYPE quintlet_socket_refused counter\nquintlet_socket_refused_total 0\n# EOF\n";
    const PROBE: &str = "# HELP quintlet_socket_refused Refused.\n# TYPE quintlet_socket_refused counter\n\
        quintlet_socket_refused_total{why=\"a b\"} 1\n# HELP prober_probe P.\n# TYPE prober_probe counter\n\
        prober_probe_total{result=\"failed\"} 2\n# EOF\n";

    fn parts<'a>(texts: &[&'a str]) -> Vec<Part<'a>> {
        let names = [("pod-sync", ""), ("probe-service", "probe-0")];
        texts.iter().zip(names).map(|(text, (service, instance))| Part { service, instance, text }).collect()
    }

    #[test]
    fn bounds_of_buckets_are_written_as_the_kubelet_writes_them() {
        let text = "# HELP h H.\n# TYPE h histogram\nh_bucket{a=\"le=1.0\",le=\"0.005\"} 1\n\
            h_bucket{le=\"1.0\",a=\"x\"} 2\nh_bucket{le=\"10.0\"} 3\nh_bucket{le=\"+Inf\"} 3\nh_sum 1.0\n\
            # HELP g G.\n# TYPE g gauge\ng{le=\"1.0\"} 1\n# EOF\n";
        let merged = merge(&parts(&[text]));
        let samples: Vec<&str> = merged.lines().filter(|l| !l.starts_with('#')).collect();
        let want = [
            "g{le=\"1.0\"} 1",
            "h_bucket{a=\"le=1.0\",le=\"0.005\"} 1",
            "h_bucket{le=\"1\",a=\"x\"} 2",
            "h_bucket{le=\"10\"} 3",
            "h_bucket{le=\"+Inf\"} 3",
            "h_sum 1.0",
        ];
        assert_eq!(samples, want);
        for (number, want) in [
            (0.0, "0"),
            (1.0, "1"),
            (2.5, "2.5"),
            (0.0001, "0.0001"),
            (0.000_01, "1e-05"),
            (1_048_576.0, "1.048576e+06"),
            (999_999.0, "999999"),
            (1e6, "1e+06"),
            (1e100, "1e+100"),
        ] {
            assert_eq!(go_number(number), want);
        }
    }

    #[test]
    fn families_of_the_kubelet_keep_their_labels_and_shared_ones_name_the_service() {
        let merged = merge(&parts(&[POD_SYNC, PROBE]));
        let want = "# HELP kubelet_started_pods_total Pods started.\n# TYPE kubelet_started_pods_total counter\n\
            kubelet_started_pods_total 3\n\
            # HELP prober_probe_total P.\n# TYPE prober_probe_total counter\n\
            prober_probe_total{result=\"failed\"} 2\n\
            # HELP quintlet_socket_refused_total Refused.\n# TYPE quintlet_socket_refused_total counter\n\
            quintlet_socket_refused_total{service=\"pod-sync\"} 0\n\
            quintlet_socket_refused_total{service=\"probe-service\",instance=\"probe-0\",why=\"a b\"} 1\n";
        assert_eq!(merged, want);
        assert!(only(&merged, |n| n.starts_with("prober_")).lines().count() == 3);
    }

    proptest! {
        #[test]
        fn no_text_causes_a_panic(a in "[a-z#{}\" =_0-9\n]{0,200}", b in "(# (HELP|TYPE) [a-z]{0,4}[ a-z]{0,9}\n|[a-z]{0,4}[{} 0-9]{0,9}\n){0,9}") {
            let _ = only(&merge(&parts(&[&a, &b])), |n| n.len() > 1);
        }
    }
}
