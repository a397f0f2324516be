//! The format of pprof (`perftools.profiles.Profile` of <https://github.com/google/pprof>): the fields that
//! profiles of Quintlet have. Texts are indexes of `string_table`, whose first entry is empty.

use std::collections::HashMap;
use std::io::{self, Read as _, Write as _};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use prost::Message as _;

/// Largest profile that is decoded, in bytes.
const MAX_BYTES: u64 = 256 << 20;

/// Samples of one process.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Profile {
    /// The meaning of each value of a sample.
    #[prost(message, repeated, tag = "1")]
    pub sample_type: Vec<ValueType>,
    /// Stacks with their values.
    #[prost(message, repeated, tag = "2")]
    pub sample: Vec<Sample>,
    /// Files whose code the process had mapped.
    #[prost(message, repeated, tag = "3")]
    pub mapping: Vec<Mapping>,
    /// Addresses of samples.
    #[prost(message, repeated, tag = "4")]
    pub location: Vec<Location>,
    /// Functions of locations.
    #[prost(message, repeated, tag = "5")]
    pub function: Vec<Function>,
    /// All texts.
    #[prost(string, repeated, tag = "6")]
    pub string_table: Vec<String>,
    /// Start, in nanoseconds since the epoch.
    #[prost(int64, tag = "9")]
    pub time_nanos: i64,
    /// Duration in nanoseconds.
    #[prost(int64, tag = "10")]
    pub duration_nanos: i64,
    /// Kind and unit of [`Profile::period`].
    #[prost(message, optional, tag = "11")]
    pub period_type: Option<ValueType>,
    /// Amount for which one sample stands.
    #[prost(int64, tag = "12")]
    pub period: i64,
}

/// The kind and the unit of a value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
pub struct ValueType {
    /// Name of the kind, such as `cpu`.
    #[prost(int64, tag = "1")]
    pub r#type: i64,
    /// Name of the unit, such as `nanoseconds`.
    #[prost(int64, tag = "2")]
    pub unit: i64,
}

/// A stack.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Sample {
    /// Ids of locations, innermost first.
    #[prost(uint64, repeated, tag = "1")]
    pub location_id: Vec<u64>,
    /// One value for each [`Profile::sample_type`].
    #[prost(int64, repeated, tag = "2")]
    pub value: Vec<i64>,
    /// Properties, such as the thread.
    #[prost(message, repeated, tag = "3")]
    pub label: Vec<Label>,
}

/// A property of a sample.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
pub struct Label {
    /// Name of the property.
    #[prost(int64, tag = "1")]
    pub key: i64,
    /// Text of the property.
    #[prost(int64, tag = "2")]
    pub str: i64,
    /// Number of the property.
    #[prost(int64, tag = "3")]
    pub num: i64,
}

/// A range of addresses and the file that is mapped there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
pub struct Mapping {
    /// Unique, not zero.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// First address.
    #[prost(uint64, tag = "2")]
    pub memory_start: u64,
    /// Address after the last one.
    #[prost(uint64, tag = "3")]
    pub memory_limit: u64,
    /// Offset in the file that is at the first address.
    #[prost(uint64, tag = "4")]
    pub file_offset: u64,
    /// Path of the file.
    #[prost(int64, tag = "5")]
    pub filename: i64,
    /// Hexadecimal build ID of the file.
    #[prost(int64, tag = "6")]
    pub build_id: i64,
    /// Whether locations of the mapping have the names of functions.
    #[prost(bool, tag = "7")]
    pub has_functions: bool,
}

/// An address.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Location {
    /// Unique, not zero.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// The mapping; zero if there is none.
    #[prost(uint64, tag = "2")]
    pub mapping_id: u64,
    /// The address in the process.
    #[prost(uint64, tag = "3")]
    pub address: u64,
    /// The function, once its name is known.
    #[prost(message, repeated, tag = "4")]
    pub line: Vec<Line>,
}

/// A line of a function.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
pub struct Line {
    /// Id of the function.
    #[prost(uint64, tag = "1")]
    pub function_id: u64,
    /// Number of the line; zero if it is unknown.
    #[prost(int64, tag = "2")]
    pub line: i64,
}

/// A function with a name for people and that of its file's symbols.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
pub struct Function {
    /// Unique, not zero.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// Name for people.
    #[prost(int64, tag = "2")]
    pub name: i64,
    /// Name in the file's symbols.
    #[prost(int64, tag = "3")]
    pub system_name: i64,
}

impl Profile {
    /// Returns the encoding that tools expect: a compressed message.
    ///
    /// # Errors
    /// Memory is exhausted.
    pub fn encode_compressed(&self) -> io::Result<Vec<u8>> {
        let mut out = GzEncoder::new(Vec::new(), Compression::default());
        out.write_all(&self.encode_to_vec())?;
        out.finish()
    }

    /// Reads what [`Profile::encode_compressed`] returned.
    ///
    /// # Errors
    /// The bytes are no profile, or one of more than 256 MiB.
    pub fn decode_compressed(bytes: &[u8]) -> io::Result<Self> {
        let mut message = Vec::new();
        let read = GzDecoder::new(bytes).take(MAX_BYTES).read_to_end(&mut message)?;
        if u64::try_from(read).is_ok_and(|read| read >= MAX_BYTES) {
            return Err(io::Error::other("the profile is too large"));
        }
        Self::decode(&*message).map_err(io::Error::other)
    }

    /// Returns a text of the table. An index that the table does not have is the empty text.
    #[must_use]
    pub fn text(&self, index: i64) -> &str {
        usize::try_from(index).ok().and_then(|index| self.string_table.get(index)).map_or("", String::as_str)
    }
}

/// Builds a table of texts.
#[derive(Debug)]
pub struct Strings {
    table: Vec<String>,
    indexes: HashMap<String, i64>,
}

impl Default for Strings {
    fn default() -> Self {
        Self::from_table(vec![String::new()])
    }
}

impl Strings {
    /// Continues a table.
    #[must_use]
    pub fn from_table(table: Vec<String>) -> Self {
        let indexes = table.iter().cloned().zip(0..).collect();
        Self { table, indexes }
    }

    /// Returns the index of a text, which is added if it is new.
    pub fn index(&mut self, text: &str) -> i64 {
        if let Some(index) = self.indexes.get(text) {
            return *index;
        }
        let index = i64::try_from(self.table.len()).unwrap_or(i64::MAX);
        self.table.push(text.to_owned());
        self.indexes.insert(text.to_owned(), index);
        index
    }

    /// Returns the texts so far.
    #[must_use]
    pub fn table(&self) -> &[String] {
        &self.table
    }

    /// Ends the table, for [`Profile::string_table`].
    #[must_use]
    pub fn into_table(self) -> Vec<String> {
        self.table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_read_as_it_was_written_and_other_bytes_are_refused() {
        let mut strings = Strings::default();
        let main = strings.index("main");
        assert_eq!((main, strings.index("main"), strings.index("")), (1, 1, 0));
        let profile = Profile {
            sample: vec![Sample { location_id: vec![1], value: vec![2], label: Vec::new() }],
            string_table: strings.into_table(),
            ..Profile::default()
        };
        let bytes = profile.encode_compressed().unwrap();
        assert_eq!(Profile::decode_compressed(&bytes).unwrap(), profile);
        assert_eq!((profile.text(1), profile.text(9), profile.text(-1)), ("main", "", ""));
        assert!(Profile::decode_compressed(&bytes[..bytes.len() / 2]).is_err());
        assert!(Profile::decode_compressed(b"no profile").is_err());
    }
}
