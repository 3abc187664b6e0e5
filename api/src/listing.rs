//! Pages of lists. What is in the directory is sorted and searched here, with the same parameters for every
//! noun; what the shards keep comes in the order of its ids, and is only cut into pages here.

use std::{
    collections::BTreeMap,
    fmt::{self, Debug},
    str::FromStr,
    sync::Arc,
};

use domain::{Timestamp, account::Tenant};
use poem::{FromRequest, Request, RequestBody};
use poem_openapi::types::{ParseFromJSON, ToJSON, Type};
use serde_json::{Value, json};

use crate::{
    Shared,
    cursor::{self, Cursor},
    envelope::Page,
    error::Problem,
    query,
};

/// Most items of a page.
const LIMIT_MAX: u32 = 100;

/// Lists that take all parameters of [`Listing`], and whether their items have a name.
pub(crate) const LISTS: [(&str, bool); 10] = [
    ("listAgents", true),
    ("listCloudAgents", true),
    ("listClouds", true),
    ("listApiKeys", true),
    ("listUsers", true),
    ("listInvitations", false),
    ("listOrganizations", true),
    ("listApplications", true),
    ("listSecrets", true),
    ("listWebhooks", false),
];

/// What lists are sorted and searched by.
pub(crate) trait Listed {
    /// Whether it has a name, by which it can be sorted and found.
    const IS_NAMED: bool = true;

    /// Tells equals apart.
    fn id(&self) -> String;
    /// Its name, if it has one, and what else `q` looks into.
    fn texts(&self) -> Vec<&str>;
    /// When it was made.
    fn created_at(&self) -> Timestamp;
    /// When it was last changed.
    fn updated_at(&self) -> Timestamp {
        self.created_at()
    }
    /// The client's own notes.
    fn metadata(&self) -> Option<&BTreeMap<String, String>> {
        None
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SortKey {
    Created,
    Updated,
    Name,
}

#[derive(Clone, Copy, Debug)]
struct Sort {
    key: SortKey,
    descending: bool,
}

impl Sort {
    fn of(text: &str) -> Result<Self, Problem> {
        let (descending, name) = text.strip_prefix('-').map_or((false, text), |name| (true, name));
        let key = match name {
            "created_at" => SortKey::Created,
            "updated_at" => SortKey::Updated,
            "name" => SortKey::Name,
            _ => {
                let why =
                    "must be created_at, updated_at or name, with - in front to turn it round";
                return Err(Problem::field("sort", why));
            }
        };
        Ok(Self { key, descending })
    }

    /// Where a row stands.
    fn place(self, row: &impl Listed) -> Place {
        let name = || row.texts().first().map(|name| name.to_lowercase()).unwrap_or_default();
        let key = match self.key {
            SortKey::Created => Key::Time(row.created_at()),
            SortKey::Updated => Key::Time(row.updated_at()),
            SortKey::Name => Key::Text(name()),
        };
        (key, row.id())
    }

    /// Where the last row of the page before stood.
    fn place_of(self, Cursor { key, id }: Cursor) -> Place {
        match self.key {
            // We wrote and signed it.
            SortKey::Created | SortKey::Updated => (Key::Time(key.parse().unwrap_or_default()), id),
            SortKey::Name => (Key::Text(key), id),
        }
    }
}

/// What a list is sorted by; all keys of a list are of one kind.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Time(Timestamp),
    Text(String),
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Time(at) => write!(f, "{at}"),
            Self::Text(text) => f.write_str(text),
        }
    }
}

/// A key, and an id for equals.
type Place = (Key, String);

/// What a client asks of a list: which items, in which order, and where the page begins.
#[derive(Clone, Debug)]
pub(crate) struct Listing {
    limit: usize,
    cursor: Option<String>,
    sort: Sort,
    name: Option<String>,
    text: Option<String>,
    created_after: Option<Timestamp>,
    created_before: Option<Timestamp>,
    metadata: BTreeMap<String, String>,
}

/// The rows of a page.
pub(crate) struct Selected<T> {
    /// In the order that was asked for.
    pub(crate) rows: Vec<Arc<T>>,
    /// How many fit, on all pages.
    pub(crate) total: usize,
    next_cursor: Option<String>,
}

impl<'a> FromRequest<'a> for Listing {
    async fn from_request(request: &'a Request, _: &mut RequestBody) -> poem::Result<Self> {
        Ok(Self::of(request)?)
    }
}

impl Listing {
    fn of(request: &Request) -> Result<Self, Problem> {
        let given = |name: &str| query::value(request, name);
        let limit = given("limit").map_or(Ok(query::LIMIT), |text| text.parse());
        let limit = limit.ok().filter(|limit| (1..=LIMIT_MAX).contains(limit));
        let limit = limit.ok_or_else(|| Problem::field("limit", "must be from 1 to 100"))?;
        Ok(Self {
            limit: limit as usize,
            cursor: given("cursor"),
            sort: Sort::of(given("sort").as_deref().unwrap_or("-created_at"))?,
            name: given("name"),
            text: given("q").map(|text| text.to_lowercase()),
            created_after: query::time("created_after", given("created_after"))?,
            created_before: query::time("created_before", given("created_before"))?,
            metadata: query::metadata(request),
        })
    }

    /// The rows of a page, of those that the caller may see and its other filters let through; the filters are
    /// named once more, as a cursor is good for the same ones alone.
    pub(crate) fn select<'r, T: Listed + 'r>(
        &self,
        shared: &Shared,
        tenant: Tenant,
        filters: &[&(dyn Debug + Sync)],
        rows: impl Iterator<Item = &'r Arc<T>>,
    ) -> Result<Selected<T>, Problem> {
        if !T::IS_NAMED {
            self.asks_for_no_name()?;
        }
        let (key, filter) = (&shared.settings.signing_key, self.filter(tenant, filters));
        let after = cursor::read(key, self.cursor.as_deref(), &filter)?;
        let after = after.map(|after| self.sort.place_of(after));
        let rows = rows.filter(|row| self.takes(&***row));
        let mut found: Vec<_> = rows.map(|row| (self.sort.place(&**row), row)).collect();
        let total = found.len();
        found.retain(|(place, _)| match &after {
            None => true,
            Some(after) if self.sort.descending => place < after,
            Some(after) => place > after,
        });
        found.sort_unstable_by(|(one, _), (other, _)| match self.sort.descending {
            true => other.cmp(one),
            false => one.cmp(other),
        });
        let has_more = found.len() > self.limit;
        found.truncate(self.limit);
        let last = found.last().filter(|_| has_more).map(|(place, _)| place.clone());
        let write =
            |(place, id): Place| cursor::write(key, Cursor { key: place.to_string(), id }, &filter);
        let rows = found.into_iter().map(|(_, row)| Arc::clone(row)).collect();
        Ok(Selected { rows, total, next_cursor: last.map(write) })
    }

    fn filter(&self, tenant: Tenant, filters: &[&(dyn Debug + Sync)]) -> String {
        let asked = (&self.sort, &self.name, &self.text, &self.metadata);
        let times = (self.created_after, self.created_before);
        let own: [&(dyn Debug + Sync); 3] = [&tenant, &asked, &times];
        cursor::filter(&own.into_iter().chain(filters.iter().copied()).collect::<Vec<_>>())
    }

    fn takes(&self, row: &impl Listed) -> bool {
        let (made, no_notes) = (row.created_at(), BTreeMap::new());
        let has_name = |name: &String| row.texts().first() == Some(&name.as_str());
        let has_text =
            |text: &String| row.texts().iter().any(|own| own.to_lowercase().contains(text));
        let notes = row.metadata().unwrap_or(&no_notes);
        self.name.as_ref().is_none_or(has_name)
            && self.text.as_ref().is_none_or(has_text)
            && self.created_after.is_none_or(|after| made > after)
            && self.created_before.is_none_or(|before| made < before)
            && self.metadata.iter().all(|(key, value)| notes.get(key) == Some(value))
    }

    fn asks_for_no_name(&self) -> Result<(), Problem> {
        let why = "the items of this list have no name";
        match (&self.name, self.sort.key) {
            (Some(_), _) => Err(Problem::field("name", why)),
            (None, SortKey::Name) => Err(Problem::field("sort", why)),
            (None, SortKey::Created | SortKey::Updated) => Ok(()),
        }
    }
}

impl<T> Selected<T> {
    /// A page of these rows, dressed.
    pub(crate) fn page<B>(self, dress: impl Fn(&T) -> B) -> Page<B>
    where
        B: ParseFromJSON + ToJSON + Type + Send + Sync,
    {
        let items = self.rows.iter().map(|row| dress(row)).collect();
        Self { rows: vec![], ..self }.page_of(items)
    }

    /// A page of these rows, dressed elsewhere.
    pub(crate) fn page_of<B>(self, items: Vec<B>) -> Page<B>
    where
        B: ParseFromJSON + ToJSON + Type + Send + Sync,
    {
        Page { items, has_more: self.next_cursor.is_some(), next_cursor: self.next_cursor }
    }
}

/// The parameters of [`Listing`], as the document describes them.
pub(crate) fn parameters(is_named: bool) -> Vec<Value> {
    let parameter = |name: &str, schema: Value, about: &str| {
        json!({
            "name": name, "in": "query", "required": false, "schema": schema, "description": about,
        })
    };
    let text = || json!({ "type": "string" });
    let time = || json!({ "type": "string", "format": "date-time" });
    let limit = json!({
        "type": "integer", "format": "uint32",
        "minimum": 1, "maximum": LIMIT_MAX, "default": query::LIMIT,
    });
    let keys: &[&str] = if is_named {
        &["created_at", "updated_at", "name"]
    } else {
        &["created_at", "updated_at"]
    };
    let orders: Vec<String> =
        keys.iter().flat_map(|key| [(*key).to_owned(), format!("-{key}")]).collect();
    let sort = json!({ "type": "string", "enum": orders, "default": "-created_at" });
    let mut all = vec![
        parameter("limit", limit, "Items of a page."),
        parameter("cursor", text(), "`next_cursor` of the page before, with the same filters."),
        parameter("sort", sort, "What comes first; `-` in front turns it round."),
        parameter("q", text(), "Only with this text in its name or description."),
        parameter("created_after", time(), "Only made after this time."),
        parameter("created_before", time(), "Only made before this time."),
    ];
    if is_named {
        all.push(parameter("name", text(), "Only of this name."));
    }
    all
}

/// What a client asks of a list that comes in the order of its ids.
pub(crate) struct Wanted {
    filter: String,
    /// Items of a page.
    pub(crate) limit: usize,
    cursor: Option<String>,
}

impl Wanted {
    /// A page of what `tenant` may see, under these filters.
    pub(crate) fn new(
        tenant: Tenant,
        filters: &[&(dyn Debug + Sync)],
        limit: Option<u32>,
        cursor: Option<String>,
    ) -> Self {
        let all: Vec<&(dyn Debug + Sync)> =
            [&tenant as &(dyn Debug + Sync)].into_iter().chain(filters.iter().copied()).collect();
        Self { filter: cursor::filter(&all), limit: limit.unwrap_or(query::LIMIT) as usize, cursor }
    }

    /// The last id of the page before.
    pub(crate) fn after<I: FromStr>(&self, shared: &Shared) -> Result<Option<I>, Problem> {
        let key = &shared.settings.signing_key;
        let after = cursor::read(key, self.cursor.as_deref(), &self.filter)?;
        Ok(after.and_then(|after| after.id.parse().ok()))
    }

    /// Dresses rows that begin after the cursor; one more than the limit tells that there are more.
    pub(crate) fn page<T, B>(
        &self,
        shared: &Shared,
        rows: impl IntoIterator<Item = T>,
        id: impl Fn(&T) -> String,
        dress: impl Fn(&T) -> B,
    ) -> Page<B>
    where
        B: ParseFromJSON + ToJSON + Type + Send + Sync,
    {
        let mut rows: Vec<T> = rows.into_iter().take(self.limit + 1).collect();
        let has_more = rows.len() > self.limit;
        rows.truncate(self.limit);
        let last = rows.last().filter(|_| has_more).map(id);
        let key = &shared.settings.signing_key;
        let write = |id| cursor::write(key, Cursor { key: String::new(), id }, &self.filter);
        Page { items: rows.iter().map(dress).collect(), has_more, next_cursor: last.map(write) }
    }
}
