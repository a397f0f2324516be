//! Health of the relist loop (`pkg/kubelet/pleg: GenericPLEG.Healthy`).

use std::time::Duration;

/// Age of the last successful list at which the node becomes not ready (`pkg/kubelet: genericPlegRelistThreshold`).
pub const THRESHOLD: Duration = Duration::from_secs(180);

/// Returns the kubelet's text for the node's condition, or none if the relist loop is healthy.
#[must_use]
pub fn problem(last_list_age: Option<Duration>, threshold: Duration) -> Option<String> {
    match last_list_age {
        None => Some("pleg has yet to be successful".to_owned()),
        Some(age) if age > threshold => Some(format!(
            "pleg was last seen active {} ago; threshold is {}",
            go_duration(age),
            go_duration(threshold)
        )),
        Some(_) => None,
    }
}

/// Formats a duration as Go does: `3m5.2s`, `1.5ms`, `0s`.
#[must_use]
pub fn go_duration(d: Duration) -> String {
    let ns = d.as_nanos();
    let fraction = |value: u128, unit: u128, digits: usize| {
        let (whole, rest) = (value.checked_div(unit), value.checked_rem(unit));
        let text = format!("{}.{:0digits$}", whole.unwrap_or(0), rest.unwrap_or(0));
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    match ns {
        0 => "0s".to_owned(),
        1..1_000 => format!("{ns}ns"),
        1_000..1_000_000 => format!("{}µs", fraction(ns, 1_000, 3)),
        1_000_000..1_000_000_000 => format!("{}ms", fraction(ns, 1_000_000, 6)),
        _ => {
            let seconds = fraction(ns % 60_000_000_000, 1_000_000_000, 9);
            let minutes = d.as_secs() / 60;
            match (minutes / 60, minutes % 60) {
                (0, 0) => format!("{seconds}s"),
                (0, m) => format!("{m}m{seconds}s"),
                (h, m) => format!("{h}h{m}m{seconds}s"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_are_the_kubelets() {
        for (age, expected) in [
            (None, Some("pleg has yet to be successful")),
            (Some(Duration::from_secs(180)), None),
            (
                Some(Duration::from_millis(185_200)),
                Some("pleg was last seen active 3m5.2s ago; threshold is 3m0s"),
            ),
        ] {
            assert_eq!(problem(age, THRESHOLD).as_deref(), expected, "{age:?}");
        }
    }

    #[test]
    fn durations_print_as_in_go() {
        for (ns, text) in [
            (0, "0s"),
            (15, "15ns"),
            (1_500, "1.5µs"),
            (2_000_000, "2ms"),
            (1_000_000_000, "1s"),
            (60_000_000_000, "1m0s"),
            (3_600_000_000_000, "1h0m0s"),
            (3_661_000_000_001, "1h1m1.000000001s"),
        ] {
            assert_eq!(go_duration(Duration::from_nanos(ns)), text);
        }
    }
}
