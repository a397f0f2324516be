//! The interface between the counts of exported spans and the client of a collector.

use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkError;
use opentelemetry_sdk::trace::SpanData;

/// A receiver of sampled spans.
pub(crate) trait SpanSink: std::fmt::Debug + Send + Sync {
    /// Sends spans. Returns how many of them the receiver rejected.
    fn send(&self, batch: Vec<SpanData>) -> impl Future<Output = Result<usize, OTelSdkError>> + Send;

    /// Sets the attributes of the process, which each span has.
    fn set_resource(&mut self, resource: &Resource);
}
