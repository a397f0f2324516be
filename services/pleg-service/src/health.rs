//! Health of the relist loop (`pkg/kubelet/pleg: GenericPLEG.Healthy`).

use std::time::Duration;

use quintlet_model::go_duration;

/// Age of the last successful list at which the node becomes not ready
/// (`pkg/kubelet: genericPlegRelistThreshold`).
pub(crate) const THRESHOLD: Duration = Duration::from_secs(180);

/// Returns the kubelet's text for the node's condition, or none if the relist loop is healthy.
#[must_use]
pub(crate) fn problem(last_list_age: Option<Duration>, threshold: Duration) -> Option<String> {
    match last_list_age {
        None => Some("pleg has yet to be successful".to_owned()),
        Some(age) if age > threshold => Some(format!(
            "pleg was last seen active {} ago; threshold is {}",
            go_duration::format(age),
            go_duration::format(threshold)
        )),
        Some(_) => None,
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
}
