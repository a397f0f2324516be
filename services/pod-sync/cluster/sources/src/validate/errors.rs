//! Errors of fields, with upstream's messages (`k8s.io/apimachinery/pkg/util/validation/field`).

use std::fmt::{self, Display};

/// Errors that are listed for one pod. Further ones are only counted.
const MAX_LISTED_ERRORS: usize = 100;
/// Characters of an invalid value that an error shows.
const MAX_SHOWN_CHARS: usize = 256;

/// An error of one field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldError {
    /// Path, as in `spec.containers[0].image`.
    pub field: String,
    /// Kind of error, value, and what is valid.
    pub message: String,
}

/// An invalid value, as an error shows it.
pub(super) enum BadValue<'a> {
    Text(&'a str),
    Number(i128),
    Flag(bool),
}

impl Display for BadValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => match text.char_indices().nth(MAX_SHOWN_CHARS) {
                Some((end, _)) => write!(f, "{:?}...", text.get(..end).unwrap_or_default()),
                None => write!(f, "{text:?}"),
            },
            Self::Number(number) => write!(f, "{number}"),
            Self::Flag(flag) => write!(f, "{flag}"),
        }
    }
}

impl<'a> From<&'a str> for BadValue<'a> {
    fn from(text: &'a str) -> Self {
        Self::Text(text)
    }
}

impl From<i32> for BadValue<'_> {
    fn from(number: i32) -> Self {
        Self::Number(number.into())
    }
}

impl From<i64> for BadValue<'_> {
    fn from(number: i64) -> Self {
        Self::Number(number.into())
    }
}

impl From<usize> for BadValue<'_> {
    fn from(number: usize) -> Self {
        Self::Number(i128::try_from(number).unwrap_or(i128::MAX))
    }
}

impl From<bool> for BadValue<'_> {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

/// The errors of a pod.
#[derive(Default)]
pub(super) struct Errors {
    found: Vec<FieldError>,
    more: usize,
}

impl Errors {
    pub(super) fn into_vec(mut self) -> Vec<FieldError> {
        if self.more > 0 {
            let message = format!("{} more errors", self.more);
            self.found.push(FieldError { field: "spec".to_owned(), message });
        }
        self.found
    }

    pub(super) fn len(&self) -> usize {
        self.found.len().saturating_add(self.more)
    }

    pub(super) fn plain(&mut self, field: impl Display, message: impl Display) {
        if self.found.len() < MAX_LISTED_ERRORS {
            self.found.push(FieldError { field: field.to_string(), message: message.to_string() });
        } else {
            self.more = self.more.saturating_add(1);
        }
    }

    pub(super) fn invalid<'a>(
        &mut self,
        field: impl Display,
        value: impl Into<BadValue<'a>>,
        detail: impl Display,
    ) {
        self.plain(field, format_args!("Invalid value: {}: {detail}", value.into()));
    }

    pub(super) fn required(&mut self, field: impl Display, detail: &str) {
        let colon = if detail.is_empty() { "" } else { ": " };
        self.plain(field, format_args!("Required value{colon}{detail}"));
    }

    pub(super) fn forbidden(&mut self, field: impl Display, detail: &str) {
        self.plain(field, format_args!("Forbidden: {detail}"));
    }

    pub(super) fn duplicate<'a>(&mut self, field: impl Display, value: impl Into<BadValue<'a>>) {
        self.plain(field, format_args!("Duplicate value: {}", value.into()));
    }

    pub(super) fn not_found(&mut self, field: impl Display, value: &str, detail: &str) {
        let colon = if detail.is_empty() { "" } else { ": " };
        self.plain(field, format_args!("Not found: {}{colon}{detail}", BadValue::Text(value)));
    }

    pub(super) fn too_long(&mut self, field: impl Display, most: usize) {
        self.plain(field, format_args!("Too long: may not be more than {most} bytes"));
    }

    pub(super) fn too_many(&mut self, field: impl Display, count: usize, most: usize) {
        self.plain(field, format_args!("Too many: {count}: must have at most {most} items"));
    }

    pub(super) fn unsupported(&mut self, field: impl Display, value: &str, supported: &[&str]) {
        let quoted: Vec<String> = supported.iter().map(|s| format!("{s:?}")).collect();
        let value = BadValue::Text(value);
        self.plain(
            field,
            format_args!("Unsupported value: {value}: supported values: {}", quoted.join(", ")),
        );
    }

    /// Adds an error for each rule of a format that a value violates.
    pub(super) fn format(&mut self, field: impl Display, value: &str, broken: Vec<&'static str>) {
        for rule in broken {
            self.invalid(&field, value, rule);
        }
    }

    /// Checks a required value against the supported ones.
    pub(super) fn word(&mut self, field: impl Display, value: Option<&str>, supported: &[&str]) {
        match value.unwrap_or_default() {
            "" => self.required(field, ""),
            word if supported.contains(&word) => {}
            word => self.unsupported(field, word, supported),
        }
    }

    /// Checks an optional value against the supported ones. It must not be empty.
    pub(super) fn word_if_set(&mut self, field: impl Display, value: Option<&str>, supported: &[&str]) {
        if let Some(word) = value
            && !supported.contains(&word)
        {
            self.unsupported(field, word, supported);
        }
    }
}
