-- Checks of the store: objects, schemas and parents. `intake` has what was noted while files were fetched.

-- check: damaged_objects
-- unit: object
-- needs: nothing
-- Objects that differ from their manifests, and those that no manifest names (`tasks.tables.sets`). Damaged objects are
-- left out of all other checks; objects that no manifest names are never read.
select id, data_set, detail from intake where kind in ('damaged', 'strays')
-- measured:
select damaged + strays, objects, format('{} of {} objects are missing or damaged', damaged, objects)
    || if(strays > 0, format('; {} objects are named by no manifest', strays), '')
    || if(collected > 0, format('; the data of {} data sets were collected by gc', collected), '')
from (
    select count(*) filter (kind = 'damaged') as damaged, count(*) filter (kind = 'strays') as strays,
        getvariable('objects') as objects, getvariable('collected') as collected
    from intake
)

-- check: wrong_schema
-- unit: object
-- needs: nothing
-- Files that are not Parquet, or have a newer or another schema. They are left out of all other checks.
select id, data_set, detail from intake where kind = 'foreign'
-- measured:
select foreigners, objects, format('{} of {} files have an unknown schema', foreigners, objects)
from (select cases_of('wrong_schema', 'object') as foreigners, getvariable('objects') as objects)

-- check: broken_parents
-- unit: object
-- needs: nothing
-- Parents whose manifest is missing or has another hash, and rows that name another policy or problem set.
select id, data_set, detail from intake where kind = 'orphaned'
-- also trajectory:
from other_parents
-- measured:
select orphaned + mismatched, parents, format(
    '{} of {} parents are missing or changed; {} rows name other parents', orphaned, parents, mismatched)
from (
    select cases_of('broken_parents', 'object') as orphaned, cases_of('broken_parents', 'trajectory') as mismatched,
        getvariable('parents') as parents
)
