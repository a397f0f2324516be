//! Metrics in the text format.

use std::collections::BTreeMap;

use serde::Serialize;

/// A queue within a service.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Queue {
    /// Name of the queue.
    pub queue: String,
    /// Messages that wait.
    pub waiting: u64,
    /// Messages that may wait.
    pub capacity: u64,
    /// Messages that were dropped since the start of the process.
    pub dropped: u64,
}

/// Returns the queues of a service, by name (`quintlet_kit::queue`).
#[must_use]
pub fn queues(metrics: &str) -> Vec<Queue> {
    let mut found: BTreeMap<&str, Queue> = BTreeMap::new();
    for line in metrics.lines().filter_map(|line| line.strip_prefix("quintlet_queue_")) {
        let Some((metric, rest)) = line.split_once("{queue=\"") else { continue };
        let Some((name, number)) = rest.split_once("\"} ") else { continue };
        let Ok(number) = number.parse::<u64>() else { continue };
        let queue = found.entry(name).or_insert_with(|| Queue { queue: name.to_owned(), ..Queue::default() });
        match metric {
            "depth" => queue.waiting = number,
            "capacity" => queue.capacity = number,
            "dropped_total" => queue.dropped = number,
            _ => {}
        }
    }
    found.into_values().collect()
}

/// Returns the value of a metric without labels.
#[must_use]
pub fn value(metrics: &str, name: &str) -> Option<f64> {
    metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// Returns the sum and the count of a histogram, over all its labels.
#[must_use]
pub fn sums(metrics: &str, name: &str) -> Option<(f64, f64)> {
    let total = |suffix: &str| {
        let full = format!("{name}{suffix}");
        let values = metrics.lines().filter_map(|line| {
            let rest = line.strip_prefix(&full)?;
            (rest.starts_with('{') || rest.starts_with(' '))
                .then(|| rest.rsplit(' ').next()?.parse::<f64>().ok())?
        });
        values.reduce(|a, b| a + b)
    };
    Some((total("_sum")?, total("_count")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_is_added_up_over_its_labels() {
        let text = "x_seconds_sum{a=\"1\"} 0.5\nx_seconds_count{a=\"1\"} 2\nx_seconds_sum{a=\"2\"} 1.5\nx_seconds_count{a=\"2\"} 3\nx_seconds_more_sum 9\n";
        assert_eq!(sums(text, "x_seconds"), Some((2.0, 5.0)));
        assert_eq!(sums("", "x_seconds"), None);
    }

    #[test]
    fn the_metrics_of_a_queue_belong_to_its_name() {
        let text = "quintlet_queue_depth{queue=\"a\"} 2\nquintlet_queue_depth{queue=\"b\"} 0\n# EOF\n\
                    quintlet_queue_capacity{queue=\"a\"} 9\nquintlet_queue_dropped_total{queue=\"a\"} 3\n";
        let queue = |queue: &str, waiting, capacity, dropped| Queue {
            queue: queue.to_owned(),
            waiting,
            capacity,
            dropped,
        };
        assert_eq!(queues(text), [queue("a", 2, 9, 3), queue("b", 0, 0, 0)]);
        assert_eq!(queues(""), []);
    }
}
