//! One line per event on stderr, as text or JSON, with the pod and the trace it belongs to.
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::str::FromStr;

use opentelemetry::Context as OtelContext;
use opentelemetry::trace::TraceContextExt as _;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

use crate::ring::POD_UID;

/// How log lines look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
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
            other => Err(format!("{other:?} is not a log format: text or json")),
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

/// Writes events to stderr.
pub(crate) struct LogLayer {
    service: &'static str,
    format: LogFormat,
}

impl LogLayer {
    pub(crate) fn new(service: &'static str, format: LogFormat) -> Self {
        Self { service, format }
    }
}

/// The pod a span is about, kept with the span.
struct PodUid(String);

#[derive(Default)]
struct PodUidVisitor(Option<String>);

impl Visit for PodUidVisitor {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == POD_UID {
            self.0 = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == POD_UID {
            self.0 = Some(format!("{value:?}"));
        }
    }
}

/// The fields of one event.
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
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.push(field, Value::String(value.to_owned()));
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
        self.push(field, Value::String(format!("{value:?}")));
    }
}

/// What one line says besides its fields.
struct Line<'a> {
    at: jiff::Timestamp,
    level: &'a tracing::Level,
    service: &'static str,
    target: &'a str,
    pod_uid: Option<String>,
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
        for (name, value) in [(POD_UID, self.pod_uid), ("trace", self.trace_id)] {
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
        for (name, value) in [(POD_UID, self.pod_uid), ("trace_id", self.trace_id)] {
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

/// A message stays on its line whatever is in it.
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
        let mut visitor = PodUidVisitor::default();
        attrs.record(&mut visitor);
        if let (Some(uid), Some(span)) = (visitor.0, ctx.span(id)) {
            span.extensions_mut().replace(PodUid(uid));
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, ctx: Context<'_, S>) {
        let mut visitor = PodUidVisitor::default();
        values.record(&mut visitor);
        if let (Some(uid), Some(span)) = (visitor.0, ctx.span(id)) {
            span.extensions_mut().replace(PodUid(uid));
        }
    }

    fn on_event(&self, event: &Event<'_>, ctx: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let named = fields.fields.iter().any(|(name, _)| *name == POD_UID);
        let pod_uid = (!named)
            .then(|| {
                ctx.event_scope(event)?
                    .find_map(|span| span.extensions().get::<PodUid>().map(|uid| uid.0.clone()))
            })
            .flatten();
        // Entering a span makes its trace current.
        let current = OtelContext::current();
        let span = current.span();
        let trace = span.span_context();
        let line = Line {
            at: jiff::Timestamp::now(),
            level: event.metadata().level(),
            service: self.service,
            target: event.metadata().target(),
            pod_uid,
            trace_id: trace.is_valid().then(|| trace.trace_id().to_string()),
        };
        let text = line.render(self.format, fields);
        // There is nowhere left to report that stderr is closed.
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(pod: Option<&str>) -> (Line<'static>, Fields) {
        let line = Line {
            at: "2026-11-21T02:31:07.112345Z".parse().unwrap(),
            level: &tracing::Level::INFO,
            service: "pod-sync",
            target: "pod_sync::worker",
            pod_uid: pod.map(str::to_owned),
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
            "2026-11-21T02:31:07.112Z  INFO pod-sync two\\nlines exit=3 why=\"a b\" container=main pod.uid=u1\n"
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
}
