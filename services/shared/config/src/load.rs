//! Reads configuration files, merges them with flags and checks the result.
//!
//! Precedence is that of the kubelet: defaults, then the file, then the drop-ins in lexical order (JSON merge
//! patches), then flags. A configuration with an error is rejected as a whole, and all errors are reported
//! together.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::Config;
use crate::diagnostics::{Diagnostic, Severity};
use crate::node::{Data, LocatedValue, Origin};
use crate::print::MASKED;
use crate::table::{CRASH_LOOP_MAX, Document, GATES, Row, SETTABLE, Service};
use crate::{kind, rules, suggest, yaml};

/// Field with the share of traces that are exported.
const SAMPLING_RATE: &str = "tracing.samplingRatePerMillion";

/// Largest size of a file in bytes, far above that of any configuration.
const MAX_BYTES: usize = 1 << 20;

/// Extension of drop-in files.
const DROP_IN: &str = "conf";

/// The sources of a configuration.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// The file (`--config`).
    pub file: Option<PathBuf>,
    /// The directory of drop-ins (`--config-dir`).
    pub drop_ins: Option<PathBuf>,
    /// Fields set by flags, which take precedence over all files.
    pub flags: Vec<(Document, &'static Row, LocatedValue)>,
    /// Treat warnings as errors.
    pub strict: bool,
    /// The service that the flags are for. Not set: all.
    pub service: Option<Service>,
}

impl Config {
    /// Reads, merges and checks the sources.
    ///
    /// # Errors
    /// Returns all errors and warnings if there is at least one error.
    pub fn load(sources: &Sources) -> Result<Self, Vec<Diagnostic>> {
        let mut loader = Loader::default();
        for file in loader.files(sources) {
            loader.read(&file);
        }
        loader.finish(sources)
    }

    /// Parses and checks `bytes` as the content of `file`, as [`Config::load`] does.
    ///
    /// # Errors
    /// Returns all errors and warnings if there is at least one error.
    pub fn from_bytes(bytes: &[u8], file: &Path, strict: bool) -> Result<Self, Vec<Diagnostic>> {
        let mut loader = Loader::default();
        loader.bytes(bytes, &file.into());
        loader.finish(&Sources { strict, ..Sources::default() })
    }
}

#[derive(Default)]
struct Loader {
    diagnostics: Vec<Diagnostic>,
    /// The merged documents of the files.
    documents: [Option<LocatedValue>; 2],
}

impl Loader {
    fn error(&mut self, file: &Arc<Path>, line: usize, message: impl Into<String>) {
        self.diagnostics.push(Diagnostic::error(Origin::File(Arc::clone(file), line), "", message));
    }

    /// Returns the files in the order in which they are merged.
    fn files(&mut self, sources: &Sources) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = sources.file.iter().cloned().collect();
        if let Some(dir) = &sources.drop_ins {
            let mut found = Vec::new();
            if let Err((path, error)) = walk(dir, &mut found) {
                self.error(&path.as_path().into(), 1, format!("cannot be read: {error}"));
            }
            files.extend(found);
        }
        files
    }

    fn read(&mut self, path: &Path) {
        let file: Arc<Path> = path.into();
        match std::fs::read(path) {
            Ok(bytes) => self.bytes(&bytes, &file),
            Err(error) => self.error(&file, 1, format!("cannot be read: {error}")),
        }
    }

    fn bytes(&mut self, bytes: &[u8], file: &Arc<Path>) {
        if bytes.len() > MAX_BYTES {
            return self.error(file, 1, "is larger than 1 MiB");
        }
        let text = match std::str::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => {
                let before = &bytes[..error.valid_up_to()];
                let line = before.iter().filter(|b| **b == b'\n').count().saturating_add(1);
                return self.error(file, line, "is not UTF-8");
            }
        };
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let (documents, diagnostics) = yaml::documents(text, file);
        let broken = !diagnostics.is_empty();
        self.diagnostics.extend(diagnostics);
        if documents.is_empty() && !broken {
            self.error(file, 1, "is empty, expected a KubeletConfiguration or a QuintletConfiguration");
        }
        let mut seen: Vec<Document> = Vec::new();
        for document in documents {
            let origin = document.origin.clone();
            let Some(which) = self.which(&document) else { continue };
            if seen.contains(&which) {
                self.diagnostics.push(Diagnostic::error(origin, "", format!("duplicate {}", which.kind())));
                continue;
            }
            seen.push(which);
            self.add(which, document, file);
        }
    }

    /// Returns the kind of a document.
    fn which(&mut self, document: &LocatedValue) -> Option<Document> {
        let mut report = |node: &LocatedValue, path: &str, message: String| {
            self.diagnostics.push(Diagnostic::error(node.origin.clone(), path, message));
        };
        if !matches!(document.data, Data::Map(_)) {
            report(document, "", format!("{}: must be a map of fields", document.data));
            return None;
        }
        let kinds = Document::ALL.map(Document::kind);
        let Some(kind) = document.at("kind") else {
            report(document, "kind", format!("required: {}", kind::or_list(&kinds)));
            return None;
        };
        let Some(which) = Document::ALL.into_iter().find(|d| Some(d.kind()) == kind.text()) else {
            report(kind, "kind", format!("{}: must be {}", kind.data, kind::or_list(&kinds)));
            return None;
        };
        match document.at("apiVersion") {
            None => report(document, "apiVersion", format!("required: {}", which.api_version())),
            Some(version) if version.text() != Some(which.api_version()) => {
                report(version, "apiVersion", format!("{}: must be {}", version.data, which.api_version()));
            }
            Some(_) => {}
        }
        Some(which)
    }

    /// Checks a document and merges it over those of earlier files.
    fn add(&mut self, which: Document, mut document: LocatedValue, file: &Path) {
        if let Data::Map(entries) = &mut document.data {
            entries.retain(|e| e.key != "kind" && e.key != "apiVersion");
        }
        unknown_fields(which, &document, "", &mut self.diagnostics);
        for row in which.rows() {
            if let Some(value) = document.at(row.field) {
                check(row, value, &mut self.diagnostics);
            }
        }
        let dir = file.parent().unwrap_or(Path::new(""));
        resolve_paths(which, &mut document, dir);
        let merged = &mut self.documents[which as usize];
        merged.get_or_insert_with(LocatedValue::empty).merge(document);
    }

    fn finish(mut self, sources: &Sources) -> Result<Config, Vec<Diagnostic>> {
        let has_kubelet_file = self.documents[Document::Kubelet as usize].is_some();
        let [kubelet, quintlet] = self.documents.map(|d| d.unwrap_or_else(LocatedValue::empty));
        let mut config = Config { kubelet, quintlet, warnings: Vec::new() };
        for (document, row, value) in &sources.flags {
            check(row, value, &mut self.diagnostics);
            let target = match document {
                Document::Kubelet => &mut config.kubelet,
                Document::Quintlet => &mut config.quintlet,
            };
            match (row.field, target.at(row.field)) {
                // Feature gates from flags are merged with those of the files.
                ("featureGates", Some(there)) => {
                    let mut both = there.clone();
                    both.merge(value.clone());
                    target.put(row.field, both);
                }
                _ => target.put(row.field, value.clone()),
            }
        }
        for document in Document::ALL {
            let target = match document {
                Document::Kubelet => &mut config.kubelet,
                Document::Quintlet => &mut config.quintlet,
            };
            fill(document, target);
        }
        unknown_gates(&config.kubelet, &mut self.diagnostics);
        // Values of a wrong type would cause misleading further errors.
        if !self.diagnostics.iter().any(Diagnostic::is_error) {
            rules::check(&config, sources.service, &mut self.diagnostics);
            set_derived_defaults(&mut config);
            if has_kubelet_file {
                set_defaults_of_files(&mut config);
            }
        }
        if sources.strict {
            self.diagnostics.iter_mut().for_each(|m| m.severity = Severity::Error);
        }
        if self.diagnostics.iter().any(Diagnostic::is_error) {
            return Err(self.diagnostics);
        }
        config.warnings = self.diagnostics;
        Ok(config)
    }
}

/// Reports the problems of a value. A value that stands for the default is valid.
fn check(row: &Row, value: &LocatedValue, out: &mut Vec<Diagnostic>) {
    if !counts(row, value) {
        return;
    }
    let first = out.len();
    row.kind.check(value, row.field, out);
    if row.secret {
        // The messages have the value.
        for diagnostic in out.iter_mut().skip(first) {
            diagnostic.message = format!("{MASKED}: must be {}", row.kind.form());
        }
    }
}

/// Returns whether a value is set explicitly. In a file, zero stands for the default; as in the kubelet, the
/// zero of a flag does not.
fn counts(row: &Row, value: &LocatedValue) -> bool {
    let by_flag = matches!(value.origin, Origin::Flag(_)) && value.text() != Some("");
    row.zero_counts || by_flag || !row.kind.is_zero(value)
}

/// Collects the files with the extension `.conf`. Directories are walked in lexical order, as in the kubelet.
fn walk(dir: &Path, out: &mut Vec<PathBuf>) -> Result<(), (PathBuf, std::io::Error)> {
    let failed = |error| (dir.to_path_buf(), error);
    let mut entries: Vec<PathBuf> = std::fs::read_dir(dir)
        .and_then(|entries| entries.map(|e| e.map(|e| e.path())).collect())
        .map_err(failed)?;
    entries.sort();
    for path in entries {
        // A link to a directory is not followed, so the walk has no cycles.
        let kind = std::fs::symlink_metadata(&path).map_err(|error| (path.clone(), error))?;
        if kind.is_dir() {
            walk(&path, out)?;
        } else if path.extension().is_some_and(|e| e == DROP_IN) {
            out.push(path);
        }
    }
    Ok(())
}

/// Reports keys that do not belong to a field.
fn unknown_fields(which: Document, node: &LocatedValue, path: &str, out: &mut Vec<Diagnostic>) {
    let rows = which.rows();
    for entry in node.entries() {
        let full = if path.is_empty() { entry.key.clone() } else { format!("{path}.{}", entry.key) };
        if rows.iter().any(|r| r.field == full) {
            continue;
        }
        let below = format!("{full}.");
        if rows.iter().any(|r| r.field.starts_with(&below)) {
            match entry.value.data {
                Data::Map(_) => unknown_fields(which, &entry.value, &full, out),
                Data::Null => {}
                ref other => {
                    let message = format!("{other}: must be a map");
                    out.push(Diagnostic::error(entry.value.origin.clone(), full, message));
                }
            }
            continue;
        }
        let prefix = if path.is_empty() { String::new() } else { format!("{path}.") };
        let siblings = rows.iter().filter_map(|r| r.field.strip_prefix(&prefix)?.split('.').next());
        let hint = suggest::hint(&entry.key, siblings);
        out.push(match which {
            Document::Kubelet => {
                Diagnostic::warning(entry.origin.clone(), full, format!("unknown field, ignored{hint}"))
            }
            Document::Quintlet => {
                Diagnostic::error(entry.origin.clone(), full, format!("unknown field{hint}"))
            }
        });
    }
}

fn unknown_gates(kubelet: &LocatedValue, out: &mut Vec<Diagnostic>) {
    for entry in kubelet.get("featureGates").map(LocatedValue::entries).unwrap_or_default() {
        let known = || GATES.iter().chain(SETTABLE).map(|gate| gate.name);
        if !known().any(|name| name == entry.key) {
            let hint = suggest::hint(&entry.key, known());
            let path = format!("featureGates.{}", entry.key);
            out.push(Diagnostic::warning(
                entry.origin.clone(),
                path,
                format!("unknown feature gate, ignored{hint}"),
            ));
        }
    }
}

/// Resolves relative paths against the directory of the file that contains them.
fn resolve_paths(which: Document, document: &mut LocatedValue, dir: &Path) {
    for row in which.rows().iter().filter(|r| matches!(r.kind, kind::Kind::Path)) {
        let Some(value) = document.at(row.field) else { continue };
        let Some(text) = value.text().filter(|t| !t.is_empty() && !t.starts_with('/')) else { continue };
        let resolved = dir.join(text).display().to_string();
        let value = LocatedValue { data: Data::Text(resolved), origin: value.origin.clone() };
        document.put(row.field, value);
    }
}

/// Sets the defaults of fields that are not set, and converts durations to their canonical form.
fn fill(document: Document, node: &mut LocatedValue) {
    for row in document.rows() {
        let given = node.at(row.field).filter(|v| counts(row, v));
        let value = given.map(|v| row.kind.canonical(v.clone())).or_else(|| row.default_node());
        match value {
            Some(value) => node.put(row.field, value),
            None if node.at(row.field).is_some() => {
                node.put(row.field, LocatedValue::default_of(Data::Null));
            }
            None => {}
        }
    }
}

/// Sets the fields whose default depends on another field.
fn set_derived_defaults(config: &mut Config) {
    let set = |node: &LocatedValue, field: &str| node.at(field).filter(|n| n.origin.is_set()).cloned();
    let kubelet = &mut config.kubelet;
    if let Some(update) = set(kubelet, "nodeStatusUpdateFrequency")
        && set(kubelet, "nodeStatusReportFrequency").is_none()
    {
        let origin = Origin::Follows("nodeStatusUpdateFrequency");
        kubelet.put("nodeStatusReportFrequency", LocatedValue { origin, ..update });
    }
    let gate = kubelet.get("featureGates").and_then(|g| g.get(CRASH_LOOP_MAX)).map(|g| g.data.clone());
    if gate == Some(Data::Bool(false))
        && let Some(row) = Document::Kubelet.row("crashLoopBackOff.maxContainerRestartPeriod")
        && let Some(default) = row.default_node()
    {
        kubelet.put(row.field, LocatedValue { origin: Origin::Follows("featureGates"), ..default });
    }
    if let Some(verbosity) = set(kubelet, "logging.verbosity")
        && set(&config.quintlet, "logFilter").is_none()
        && let Data::Int(number) = verbosity.data
    {
        let value = LocatedValue {
            data: Data::Text(verbosity_filter(number).to_owned()),
            origin: Origin::Follows("logging.verbosity"),
        };
        config.quintlet.put("logFilter", value);
    }
    if let Some(endpoint) = set(kubelet, "tracing.endpoint")
        && matches!(endpoint.origin, Origin::File(..))
        && set(kubelet, SAMPLING_RATE).is_none()
    {
        // The kubelet begins no exported trace by itself unless a rate is set.
        let value = LocatedValue { data: Data::Int(0), origin: Origin::Follows("tracing.endpoint") };
        kubelet.put(SAMPLING_RATE, value);
    }
    if let Some(endpoint) = set(kubelet, "tracing.endpoint")
        && let Some(text) = endpoint.text().filter(|t| !t.contains("://"))
    {
        let value =
            LocatedValue { data: Data::Text(format!("http://{text}")), origin: endpoint.origin.clone() };
        kubelet.put("tracing.endpoint", value);
    }
}

/// Sets the fields whose default differs with a file: the kubelet's rules for the machine apply only where a
/// KubeletConfiguration was written for it.
fn set_defaults_of_files(config: &mut Config) {
    let origin = Origin::Follows("KubeletConfiguration");
    for (document, field) in [
        (Document::Kubelet, "failSwapOn"),
        (Document::Kubelet, "failCgroupV1"),
        (Document::Kubelet, "makeIPTablesUtilChains"),
        (Document::Quintlet, "setKernelTunables"),
    ] {
        if config.value(document, field).is_some_and(|value| value.data != Data::Null) {
            continue;
        }
        let target = match document {
            Document::Kubelet => &mut config.kubelet,
            Document::Quintlet => &mut config.quintlet,
        };
        target.put(field, LocatedValue { data: Data::Bool(true), origin: origin.clone() });
    }
}

/// Returns the filter of log lines with this verbosity of klog.
#[must_use]
pub fn verbosity_filter(verbosity: i64) -> &'static str {
    match verbosity {
        ..4 => "info",
        4..6 => "debug",
        _ => "trace",
    }
}
