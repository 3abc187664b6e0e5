//! Fields of a patch that may be left alone, cleared or set: `None`, `Some(None)`, `Some(Some(_))`. MessagePack
//! has one nil for the first two, so what is cleared is written as an empty text, which no such value is.
//!
//! For `#[serde(default, with = "crate::clearable")]`.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

#[derive(Deserialize)]
#[serde(untagged)]
enum Known<T> {
    Value(T),
    Cleared(String),
}

pub(crate) fn serialize<T: Serialize, S: Serializer>(
    field: &Option<Option<T>>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match field {
        None => serializer.serialize_none(),
        Some(None) => serializer.serialize_str(""),
        Some(Some(value)) => value.serialize(serializer),
    }
}

pub(crate) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    match Option::<Known<T>>::deserialize(deserializer)? {
        None => Ok(None),
        Some(Known::Value(value)) => Ok(Some(Some(value))),
        Some(Known::Cleared(word)) if word.is_empty() => Ok(Some(None)),
        Some(Known::Cleared(_)) => Err(D::Error::custom("neither a value nor nothing")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Patch {
        #[serde(default, with = "super")]
        field: Option<Option<u32>>,
    }

    #[derive(Serialize)]
    struct Before {
        field: Option<u32>,
    }

    #[test]
    fn what_is_cleared_stays_cleared_when_it_is_written_down() {
        for field in [None, Some(None), Some(Some(0)), Some(Some(7))] {
            let written = codec::encode(&Patch { field });
            assert_eq!(codec::decode::<Patch>(&written).expect("readable"), Patch { field });
        }
        for field in [None, Some(7)] {
            let written = codec::encode(&Before { field });
            let read =
                codec::decode::<Patch>(&written).expect("what was written before is readable");
            assert_eq!(read.field, field.map(Some));
        }
    }
}
