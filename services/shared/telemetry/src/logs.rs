//! Writes one line per event to stderr, as text or JSON, with the event's pod and trace.
use std::fmt::{self, Write as _};
use std::os::fd::AsFd;
use std::str::FromStr;

use opentelemetry::Context as OtelContext;
use opentelemetry::trace::TraceContextExt as _;
use rustix::fs::{FlockOperation, flock};
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

use crate::repeat_filter::{Fault, RepeatFilter};
use crate::ring;

/// Field of log lines with the UID of a pod.
const POD_UID: &str = "pod.uid";
/// Field of log lines with the namespace and name of a pod.
const POD_NAME: &str = "pod.name";
/// Field of spans with the namespace of a pod.
const SPAN_NAMESPACE: &str = "k8s.namespace.name";
/// Field of spans with the name of a pod.
const SPAN_POD_NAME: &str = "k8s.pod.name";
/// Field with the cause of a failure, from a fixed list. It distinguishes the faults that one place in the
/// code logs.
const REASON: &str = "reason";
/// Field with the resource that is watched at the API server. A watch fails for as long as the API server is
/// unreachable.
const WATCH: &str = "watch";

/// The format of log lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people: time, level, service, message and `name=value` fields.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("{other:?} is not a log format, expected text or json")),
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Json => "json",
        })
    }
}

/// The destination of log lines.
pub trait LogOutput: Send + Sync + 'static {
    /// Writes one line, which ends with a line break. Must not log.
    fn write(&self, line: String);
}

/// Standard error, which is the log of every service.
#[derive(Debug)]
pub(crate) struct Stderr;

impl LogOutput for Stderr {
    fn write(&self, line: String) {
        write_line(&mut std::io::stderr().lock(), line.as_bytes());
    }
}

/// Writes events as lines. Repeated faults of one pod, or of one watch of the API server, are written once a
/// minute. A fault is an event at WARN or above, or an event at INFO with a `reason`.
pub(crate) struct LogLayer {
    service: &'static str,
    format: LogFormat,
    out: Box<dyn LogOutput>,
    repeats: RepeatFilter,
}

impl LogLayer {
    pub(crate) fn new(service: &'static str, format: LogFormat, out: impl LogOutput) -> Self {
        Self { service, format, out: Box::new(out), repeats: RepeatFilter::default() }
    }
}

/// The pod of a log line.
#[derive(Debug, Clone, Default)]
struct Pod {
    uid: Option<String>,
    name: Option<String>,
}

impl Pod {
    // The fields of the line and of inner spans take precedence.
    fn or(self, outer: &SpanPod) -> Self {
        Self { uid: self.uid.or_else(|| outer.uid.clone()), name: self.name.or_else(|| outer.full_name()) }
    }
}

/// The pod of a span, stored in the span's extensions.
#[derive(Debug, Clone, Default)]
struct SpanPod {
    uid: Option<String>,
    namespace: Option<String>,
    name: Option<String>,
}

impl SpanPod {
    fn is_named(&self) -> bool {
        self.uid.is_some() || self.namespace.is_some() || self.name.is_some()
    }

    /// Returns `namespace/name`, or the name if the span has no namespace.
    fn full_name(&self) -> Option<String> {
        let name = self.name.as_ref()?;
        Some(self.namespace.as_ref().map_or_else(|| name.clone(), |namespace| format!("{namespace}/{name}")))
    }

    // Fields that are recorded later take precedence.
    fn or(self, earlier: &Self) -> Self {
        Self {
            uid: self.uid.or_else(|| earlier.uid.clone()),
            namespace: self.namespace.or_else(|| earlier.namespace.clone()),
            name: self.name.or_else(|| earlier.name.clone()),
        }
    }
}

impl Visit for SpanPod {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            ring::POD_UID => self.uid = Some(value.to_owned()),
            SPAN_NAMESPACE => self.namespace = Some(value.to_owned()),
            SPAN_POD_NAME => self.name = Some(value.to_owned()),
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if [ring::POD_UID, SPAN_NAMESPACE, SPAN_POD_NAME].contains(&field.name()) {
            self.record_str(field, &format!("{value:?}"));
        }
    }
}

#[derive(Default)]
struct Fields {
    message: String,
    fields: Vec<(&'static str, Value)>,
}

impl Fields {
    fn push(&mut self, field: &Field, value: Value) {
        match (field.name(), value) {
            ("message", Value::String(text)) => self.message = text,
            (name, value) => self.fields.push((name, value)),
        }
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(n, _)| *n == name).and_then(|(_, v)| v.as_str())
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let place = self.fields.iter().position(|(n, v)| *n == name && v.is_string())?;
        self.fields.remove(place).1.as_str().map(str::to_owned)
    }
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.push(field, Value::String(cut(value).to_owned()));
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.push(field, value.into());
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.push(field, value.into());
    }
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.push(field, value.into());
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.push(field, value.into());
    }
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        self.push(field, Value::String(cut(&text).to_owned()));
    }
}

/// Longest text of a field, in bytes. A field may have a tenant's text, such as the name of an image. Longer
/// than a message of an event, so that a log has the whole message.
const MAX_FIELD: usize = 16 << 10;

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_FIELD)]
}

/// The parts of a line other than the event's own fields.
struct Line<'a> {
    at: jiff::Timestamp,
    level: &'a tracing::Level,
    service: &'static str,
    target: &'a str,
    pod: Pod,
    trace_id: Option<String>,
}

impl Line<'_> {
    fn render(self, format: LogFormat, fields: Fields) -> String {
        match format {
            LogFormat::Text => self.text(&fields),
            LogFormat::Json => self.json(fields),
        }
    }

    fn text(self, fields: &Fields) -> String {
        let mut out = String::with_capacity(160);
        // Writing to a String does not fail.
        let _ =
            write!(out, "{:.3} {:>5} {} {}", self.at, self.level, self.service, one_line(&fields.message));
        for (name, value) in &fields.fields {
            let _ = match value {
                Value::String(s) if is_plain(s) => write!(out, " {name}={s}"),
                other => write!(out, " {name}={other}"),
            };
        }
        for (name, value) in [(POD_NAME, self.pod.name), (POD_UID, self.pod.uid), ("trace", self.trace_id)] {
            if let Some(value) = value {
                let _ = write!(out, " {name}={value}");
            }
        }
        out.push('\n');
        out
    }

    fn json(self, fields: Fields) -> String {
        let mut object = Map::new();
        object.insert("ts".to_owned(), format!("{:.6}", self.at).into());
        object.insert("level".to_owned(), self.level.as_str().to_ascii_lowercase().into());
        object.insert("service".to_owned(), self.service.into());
        object.insert("target".to_owned(), self.target.into());
        object.insert("msg".to_owned(), fields.message.into());
        for (name, value) in [(POD_NAME, self.pod.name), (POD_UID, self.pod.uid), ("trace_id", self.trace_id)]
        {
            if let Some(value) = value {
                object.insert(name.to_owned(), value.into());
            }
        }
        for (name, value) in fields.fields {
            object.insert(name.to_owned(), value);
        }
        let mut out = Value::Object(object).to_string();
        out.push('\n');
        out
    }
}

/// Escapes line breaks, so that each event is one line.
fn one_line(message: &str) -> String {
    message.replace('\r', "\\r").replace('\n', "\\n")
}

fn is_plain(value: &str) -> bool {
    !value.is_empty() && !value.contains(|c: char| c.is_whitespace() || c.is_control() || c == '"')
}

impl<S> Layer<S> for LogLayer
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    fn on_new_span(&self, attrs: &Attributes<'_>, id: &Id, ctx: Context<'_, S>) {
        let mut pod = SpanPod::default();
        attrs.record(&mut pod);
        if let Some(span) = ctx.span(id).filter(|_| pod.is_named()) {
            span.extensions_mut().replace(pod);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, ctx: Context<'_, S>) {
        let mut pod = SpanPod::default();
        values.record(&mut pod);
        if let Some(span) = ctx.span(id).filter(|_| pod.is_named()) {
            let mut extensions = span.extensions_mut();
            let pod = extensions.get_mut::<SpanPod>().map_or(pod.clone(), |known| pod.or(known));
            extensions.replace(pod);
        }
    }

    fn on_event(&self, event: &Event<'_>, ctx: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let mut pod = Pod { uid: fields.take(POD_UID), name: fields.take(POD_NAME) };
        for span in ctx.event_scope(event).into_iter().flatten() {
            if let Some(outer) = span.extensions().get::<SpanPod>() {
                pod = pod.or(outer);
            }
        }
        let level = *event.metadata().level();
        let reason = fields.text(REASON).map(str::to_owned);
        // Failures that a user's pod causes are logged at INFO, with a reason.
        let is_fault = level <= Level::WARN || level == Level::INFO && reason.is_some();
        if is_fault
            && let Some(object) =
                pod.uid.clone().or_else(|| pod.name.clone()).or_else(|| fields.text(WATCH).map(str::to_owned))
        {
            let reason = reason.unwrap_or_default();
            let site = event.metadata().callsite();
            match self.repeats.pass(Fault { object, site, reason }) {
                None => return,
                Some(0) => {}
                Some(held_back) => fields.fields.push(("held_back", held_back.into())),
            }
        }
        // The current OpenTelemetry context is that of the entered span.
        let current = OtelContext::current();
        let span = current.span();
        let trace = span.span_context();
        let line = Line {
            at: jiff::Timestamp::now(),
            level: event.metadata().level(),
            service: self.service,
            target: event.metadata().target(),
            pod,
            trace_id: trace.is_valid().then(|| trace.trace_id().to_string()),
        };
        self.out.write(line.render(self.format, fields));
    }
}

/// Writes a line under a shared lock of the file. `quintctl up` holds the exclusive lock while it truncates a
/// log that is too long. An output that cannot be locked (a terminal, a pipe, the journal) is written without
/// a lock.
pub fn write_line(out: &mut (impl std::io::Write + AsFd), line: &[u8]) {
    let is_locked = flock(out.as_fd(), FlockOperation::LockShared).is_ok();
    // A closed stderr cannot be reported anywhere.
    let _ = out.write_all(line);
    if is_locked {
        let _ = flock(out.as_fd(), FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<String>>>);

    impl Lines {
        fn all(&self) -> Vec<String> {
            self.0.lock().clone()
        }

        /// Returns a subscriber that adds log lines of INFO and above.
        fn capture(&self) -> tracing::Dispatch {
            let layer = crate::log_layer("test", LogFormat::Json, self.clone());
            tracing_subscriber::registry()
                .with(layer.with_filter(tracing_subscriber::filter::LevelFilter::INFO))
                .into()
        }
    }

    impl LogOutput for Lines {
        fn write(&self, line: String) {
            self.0.lock().push(line);
        }
    }

    fn line(pod: Option<&str>) -> (Line<'static>, Fields) {
        let line = Line {
            at: "2026-11-21T02:31:07.112345Z".parse().unwrap(),
            level: &tracing::Level::INFO,
            service: "pod-sync",
            target: "pod_sync_worker::worker",
            pod: Pod { uid: pod.map(str::to_owned), name: pod.map(|_| "default/web".to_owned()) },
            trace_id: None,
        };
        let fields = Fields {
            message: "two\nlines".to_owned(),
            fields: vec![("exit", 3.into()), ("why", "a b".into()), ("container", "main".into())],
        };
        (line, fields)
    }

    #[test]
    fn text_lines_quote_only_what_needs_it_and_stay_on_one_line() {
        let (line, fields) = line(Some("u1"));
        assert_eq!(
            line.render(LogFormat::Text, fields),
            "2026-11-21T02:31:07.112Z  INFO pod-sync two\\nlines exit=3 why=\"a b\" container=main pod.name=default/web pod.uid=u1\n"
        );
    }

    #[test]
    fn json_lines_are_objects_with_typed_fields() {
        let (line, fields) = line(None);
        let value: Value = serde_json::from_str(&line.render(LogFormat::Json, fields)).unwrap();
        assert_eq!(value["exit"], 3);
        assert_eq!(value["msg"], "two\nlines");
        assert_eq!(value["level"], "info");
        assert_eq!(value.get("pod.uid"), None);
    }

    fn logged(work: impl FnOnce()) -> Vec<Value> {
        let lines = Lines::default();
        tracing::dispatcher::with_default(&lines.capture(), work);
        lines.all().iter().map(|l| serde_json::from_str(l).unwrap()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_repeated_fault_of_a_pod_is_logged_once_a_minute_with_the_number_of_repetitions() {
        let lines = Lines::default();
        let _guard = tracing::dispatcher::set_default(&lines.capture());
        let fault = |uid: &str, reason: &str| tracing::warn!(pod.uid = uid, reason, "it failed");
        for _ in 0..59 {
            fault("u1", "Image");
            fault("u1", "Volume");
            fault("u2", "Image");
            tracing::error!(pod.uid = "u1", "another place");
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        }
        let count = || lines.all().len();
        assert_eq!(count(), 4, "{:?}", lines.all());
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        fault("u1", "Image");
        assert_eq!(count(), 5);
        let last: Value = serde_json::from_str(lines.all().last().unwrap()).unwrap();
        assert_eq!((&last["held_back"], &last["reason"]), (&58.into(), &"Image".into()), "{last}");
        for resource in ["pods", "nodes", "pods"] {
            tracing::warn!(watch = resource, "it broke");
        }
        assert_eq!(count(), 7, "one line per watch: {:?}", lines.all());
        // Events about neither a pod nor a watch, and events that are not faults, are always logged.
        for _ in 0..3 {
            tracing::warn!("of the node");
            tracing::info!(pod.uid = "u1", "no fault");
        }
        assert_eq!(count(), 13, "{:?}", lines.all());
        // A failure that a user's pod causes is limited in the same way.
        for _ in 0..3 {
            tracing::info!(pod.uid = "u1", reason = "Unhealthy", "warning event");
        }
        assert_eq!(count(), 14, "{:?}", lines.all());
    }

    #[test]
    fn a_line_has_its_own_pod_or_else_that_of_its_span() {
        let got = logged(|| {
            let pod = tracing::info_span!(
                "pod",
                k8s.pod.uid = "u1",
                k8s.pod.name = "web",
                k8s.namespace.name = tracing::field::Empty
            );
            pod.record("k8s.namespace.name", "default");
            let _pod = pod.enter();
            let _pass = tracing::info_span!("pass", k8s.pod.uid = "u1").entered();
            tracing::warn!("inner");
            tracing::warn!(pod.name = "default/other", "its own");
        });
        let names: Vec<_> = got.iter().map(|l| (l["pod.uid"].as_str(), l["pod.name"].as_str())).collect();
        assert_eq!(names, [(Some("u1"), Some("default/web")), (Some("u1"), Some("default/other"))]);
    }
}
