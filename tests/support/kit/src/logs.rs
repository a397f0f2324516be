//! Captures log lines.

use std::sync::Arc;

use parking_lot::Mutex;
use quintlet_telemetry::log_filter::SILENCED_TARGETS;
use quintlet_telemetry::{LogFormat, LogOutput, is_our_span, log_layer};
use tracing_subscriber::filter::FilterFn;
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};

/// Captured log lines. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    /// Returns the lines written so far, oldest first, each a JSON object as `--log-format json` writes it.
    #[must_use]
    pub fn all(&self) -> Vec<String> {
        self.0.lock().clone()
    }
}

impl LogOutput for Lines {
    fn write(&self, line: String) {
        self.0.lock().push(line);
    }
}

/// Returns a subscriber that appends log lines of `level` and above to `lines`.
#[must_use]
pub fn capture(service: &'static str, level: tracing::Level, lines: &Lines) -> tracing::Dispatch {
    let wanted = FilterFn::new(move |metadata| {
        is_our_span(metadata)
            || metadata.is_event()
                && *metadata.level() <= level
                && !SILENCED_TARGETS.contains(&metadata.target())
    });
    let layer = log_layer(service, LogFormat::Json, lines.clone());
    tracing_subscriber::registry().with(layer.with_filter(wanted)).into()
}
